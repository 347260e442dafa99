"""What the tensors themselves tell of a cause, where weights and settings do not: norms, routers, scales, positions."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.align.causes import Cause
from msprobe_megatron.analysis.align.tensors import StepTensors

Floats = npt.NDArray[np.float64]
_NORM = re.compile(r"(layernorm|_norm)$")
_SEVERAL = 1.5


def causes_of_tensors(golden: StepTensors, run: StepTensors, name: str, io: str, path: str) -> list[Cause]:
    """Causes that the first tensor to differ, and those around it, give away."""
    return [*_norm(golden, run, name), *_router(golden, run, name), *_scale(golden, run, name, io, path)]


def _values(side: StepTensors, name: str, io: str, *paths: str) -> Floats | None:
    for path in paths:
        found = side.whole(("activation", name, io, path))
        if found is not None:
            return found.values()
    return None


def _norm(golden: StepTensors, run: StepTensors, name: str) -> Iterator[Cause]:
    """The epsilon that an RMS norm used, from its input, its output and its weight."""
    if not _NORM.search(name):
        return
    found = []
    for side in (golden, run):
        x, y = _values(side, name, "input", "x", "input", "hidden_states"), _values(side, name, "output", "")
        weight = side.whole(("parameter", f"{name}.weight", "weight", ""))
        if x is None or y is None or weight is None or x.shape != y.shape:
            return
        found.append(epsilon(x, y, weight.values()))
    if min(found) < 0 or max(found) <= 0:
        return
    if max(found) > _SEVERAL * max(min(found), 1e-12):
        yield Cause("norm-epsilon", f"norm epsilon {found[0]:.2g} against {found[1]:.2g}, measured at {name}", name)


def epsilon(x: Floats, y: Floats, weight: Floats) -> float:
    """The epsilon of an RMS norm: (w x / y)^2 is the mean square plus epsilon, in every element."""
    squares = (x * x).mean(-1, keepdims=True)
    with np.errstate(all="ignore"):
        each = (weight * x / y) ** 2 - squares
    good = np.isfinite(each) & (np.abs(x) > np.sqrt(squares)) & (np.abs(weight) > 0.1)
    return float(np.median(each[good])) if good.any() else -1.0


def _router(golden: StepTensors, run: StepTensors, name: str) -> Iterator[Cause]:
    """Sums of the probabilities of a token: a router that normalises them gives 1, times its scaling factor."""
    if not name.endswith("router"):
        return
    sides = [_values(side, name, "output", "0") for side in (golden, run)]
    if sides[0] is None or sides[1] is None or sides[0].shape != sides[1].shape:
        return
    chosen = [side != 0 for side in sides if side is not None]
    sums = [side.sum(-1) for side in sides if side is not None]
    alike = (chosen[0] == chosen[1]).mean()
    steady = [float(s.std() / max(abs(s.mean()), 1e-12)) < 0.01 for s in sums]
    means = [float(s.mean()) for s in sums]
    if alike < 0.9:
        share = 1 - (chosen[0] == chosen[1]).all(-1).mean()
        text = f"{name} chooses other experts for {100 * share:.0f} % of the tokens"
        yield Cause("router-choice", text, name)
    elif steady[0] != steady[1]:
        told = [_told(mean, same) for mean, same in zip(means, steady, strict=True)]
        text = f"{name}: probabilities of a token add up to {told[0]} against {told[1]}"
        yield Cause("router-normalisation", text, name)
    elif steady[0] and abs(means[0] / means[1] - 1) > 0.01:
        text = f"{name}: probabilities of a token add up to {means[0]:.4g} against {means[1]:.4g}"
        yield Cause("router-scaling", text, name)


def _told(mean: float, steady: bool) -> str:
    return f"{mean:.4g}" if steady else f"{mean:.2g} on average: not normalised"


def _scale(golden: StepTensors, run: StepTensors, name: str, io: str, path: str) -> Iterator[Cause]:
    """One factor between the two tensors."""
    if name.endswith("router"):
        return
    a, b = _values(golden, name, io, path), _values(run, name, io, path)
    if a is None or b is None or a.shape != b.shape:
        return
    factor = float((a * b).sum() / max(float((a * a).sum()), 1e-300))
    apart = np.linalg.norm(a * factor - b) / max(float(np.linalg.norm(b)), 1e-300)
    if factor > 0 and abs(factor - 1) > 0.02 and apart < 0.01:
        yield Cause("scaled", f"{name} {io} is {factor:.4g} times that of the golden run", name)


def causes_of_angles(theirs: StepTensors, ours: StepTensors) -> list[Cause]:
    """Rotary angles of another implementation (cosines, as recorded there) that are not those of Megatron's run."""
    cosines = _values(theirs, "model.rotary_emb", "output", "0")
    angles = _values(ours, "rotary_pos_emb", "output", "")
    if cosines is None or angles is None:
        return []
    a, b = cosines[0], np.cos(angles.reshape(len(angles), -1))
    if a.shape != b.shape:
        text = f"{a.shape[-1]} rotary dimensions against {b.shape[-1]}"
        return [Cause("rope-dimensions", text, "rotary_pos_emb")]
    # Megatron may keep pairs side by side; the first position turns nothing.
    apart = np.abs(np.sort(a, -1) - np.sort(b, -1)).max(-1)
    beyond = np.flatnonzero(apart > 0.02)
    if not len(beyond):
        return []
    text = f"rotary angles differ from position {beyond[0]} on: check base, scaling and the table of frequencies"
    return [Cause("rope-angles", text, "rotary_pos_emb")]


def first_position(golden: StepTensors, run: StepTensors, name: str, io: str, path: str, limit: float) -> int | None:
    """The first position whose tokens differ by more than `limit`, relative to the size of a token; None if unknown."""
    a, b = _values(golden, name, io, path), _values(run, name, io, path)
    if a is None or b is None or a.shape != b.shape or a.ndim < 3:
        return None
    batch_first = name in ("model", "embedding.word_embeddings")
    order = (0, 2, *range(3, a.ndim)) if batch_first else tuple(range(1, a.ndim))
    size = np.sqrt((a * a).mean())
    apart = np.sqrt(((a - b) ** 2).mean(order)) / max(float(size), 1e-300)
    beyond = np.flatnonzero(apart > limit)
    return int(beyond[0]) if len(beyond) else None
