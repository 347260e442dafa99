"""Differences: a few entries of a comparison, told in full: where, by how much, on which ranks, in which source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msprobe_megatron.analyse.causes import culprit
from msprobe_megatron.analyse.hints import doubled_layers
from msprobe_megatron.analyse.judge import Judgement
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.match import Pairs
from msprobe_megatron.analyse.ranks import RankFinder
from msprobe_megatron.topology.layers import layer_of


@dataclass(frozen=True)
class Difference:
    """One tensor that differs. `microbatch` counts as the golden run does; `samples` are [first, last + 1).

    `module` is where to look: the module itself if this is its result, the one around it if it is what arrives.
    """

    module: str
    name: str
    io: str
    path: str
    kind: str
    step: int
    microbatch: int | None
    samples: tuple[int, int] | None
    phase: str
    layer: int | None
    ranks: list[int]
    site: dict[str, Any] | None
    error: float
    tolerance: float
    state: str
    what: str
    elements: dict[str, Any] | None = None
    """Of tensors that both runs saved: relative_l2, max_abs, cosine, differing, numel, largest_at, first_at."""


def each_once(pairs: Pairs, found: list[int]) -> list[int]:
    """The first sighting of each tensor: every microbatch shows the same fault."""
    seen: dict[tuple[str, ...], int] = {}
    for i in found:
        seen.setdefault(tuple(str(pairs[name][i]) for name in ("kind", "name", "io", "path")), i)
    return list(seen.values())


def difference(
    run: Run, finder: RankFinder, pairs: Pairs, judgement: Judgement, states: Sequence[str], i: int
) -> Difference:
    """Entry `i` of the pairs, for people."""
    name, whole_step = str(pairs["name"][i]), bool(np.isnan(float(pairs["microbatch"][i])))
    first = int(pairs["block"][i] * pairs["unit"][i])
    return Difference(
        module=culprit(str(pairs["kind"][i]), name, str(pairs["io"][i])),
        name=name,
        io=str(pairs["io"][i]),
        path=str(pairs["path"][i]),
        kind=str(pairs["kind"][i]),
        step=int(pairs["step"][i]),
        microbatch=None if whole_step else int(pairs["microbatch"][i]),
        samples=None if whole_step else (first, first + int(pairs["unit"][i])),
        phase=str(pairs["phase"][i]),
        layer=layer_of(name),
        ranks=finder.ranks(i, replica=bool(judgement.replica[i]), tolerance=float(judgement.tolerance[i]))
        or sorted({rank for holders in doubled_layers(run).values() for rank, _ in holders}),
        site=finder.site(i),
        error=float(judgement.error[i]),
        tolerance=float(judgement.tolerance[i]),
        state=states[i],
        what=words(pairs, judgement, i),
        elements=_elements(pairs, judgement, i),
    )


def _elements(pairs: Pairs, judgement: Judgement, i: int) -> dict[str, Any] | None:
    """Figures of saved tensors; `first_at` is the first element that is beyond the tolerance, or that differs."""
    found = pairs.tensors.figures.get(i) if pairs.tensors is not None else None
    if found is None or pairs.tensors is None:
        return None
    limit = float(judgement.tolerance[i] * np.nan_to_num(pairs["absmax_l"][i]))
    first = pairs.tensors.first(i, limit) or pairs.tensors.first(i, 0.0)
    return {
        "relative_l2": found.relative if math.isfinite(found.relative) else None,
        "max_abs": found.largest,
        "cosine": found.cosine,
        "differing": found.differing + found.unlike,
        "numel": found.numel,
        "largest_at": found.largest_at,
        "first_at": first,
    }


def words(pairs: Pairs, judgement: Judgement, i: int) -> str:
    """The figure that is furthest apart, in words."""
    if pairs["left_has"][i] != pairs["right_has"][i]:
        return f"only the {'golden run' if pairs['left_has'][i] else 'second run'} has it"
    if judgement.replica[i]:
        return "ranks that should hold the same numbers do not"
    bad = [sum(float(np.nan_to_num(pairs[f"{n}_{s}"][i])) for n in ("n_nan", "n_posinf", "n_neginf")) for s in "lr"]
    if bad[0] != bad[1]:
        return f"{bad[0]:.0f} non-finite elements against {bad[1]:.0f}"
    words = _furthest(pairs, i)
    found = pairs.tensors.figures.get(i) if pairs.tensors is not None else None
    if found is not None and found.differing:
        return (
            f"{found.differing} of {found.numel} elements differ, by {found.relative:.2g} of the norm"
            f" (cosine {found.cosine:.6g}), most at {list(found.largest_at or ())}; {words}"
        )
    return f"elements are apart by {judgement.error[i]:.2g} of the norm; {words}" if judgement.element[i] else words


def _furthest(pairs: Pairs, i: int) -> str:
    """Norm, sum, minimum or maximum: the one that is furthest apart in the units of the tolerance."""
    values = {
        name: [float(np.nan_to_num(pairs[f"{name}_{side}"][i])) for side in "lr"]
        for name in ("sumsq", "sum", "min", "max", "absmax", "numel")
    }
    norms = [math.sqrt(value) for value in values["sumsq"]]
    size, largest = max(*norms, 1e-300), max(*values["absmax"], 1e-300)
    units = {"norm": size, "sum": size * math.sqrt(max(*values["numel"], 1)), "min": 2 * largest, "max": 2 * largest}
    values["norm"] = norms
    name = max(units, key=lambda word: abs(values[word][0] - values[word][1]) / units[word])
    return f"{name} {values[name][0]:.6g} against {values[name][1]:.6g}"


def replicas(finder: RankFinder, pairs: Pairs, judgement: Judgement, odd: Sequence[int]) -> list[dict[str, Any]]:
    """Tensors on which ranks that should hold the same numbers do not, first in order of cause."""
    return [
        {
            "name": str(pairs["name"][i]),
            "io": str(pairs["io"][i]),
            "kind": str(pairs["kind"][i]),
            "step": int(pairs["step"][i]),
            "ranks": finder.ranks(i, replica=True, tolerance=float(judgement.tolerance[i])),
        }
        for i in odd
    ]


def data_differ(pairs: Pairs, judgement: Judgement, i: int) -> str:
    """What to say when the first thing that differs is the batch."""
    return (
        f"the DATA differ: {pairs['path'][i]} of the model at step {pairs['step'][i]},"
        f" microbatch {int(pairs['microbatch'][i])} ({words(pairs, judgement, i)});"
        " give both runs the same samples in the same order"
    )
