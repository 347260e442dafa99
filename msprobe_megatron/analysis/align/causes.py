"""Usual causes of a difference between two implementations, each with an id that stays the same for scripts.

Weights first: a conversion that went wrong nearly always moved numbers to another place, and the place names the fault.
Then settings of the two configurations that differ where the first tensor does. Then what the tensors themselves tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.align.forms import Sizes
from msprobe_megatron.analysis.align.tensors import StepTensors, Whole

Floats = npt.NDArray[np.float64]
_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"^(.*\.local_experts)\.(\d+)\.(.*)$")
_CLOSE = 1e-2
_MOST = 0.9


@dataclass(frozen=True)
class Cause:
    """One cause: its id, a sentence, the tensor it was seen at, and the command to go on with."""

    id: str
    text: str
    at: str
    next: str = ""

    def as_dict(self) -> dict[str, str]:
        """Plain values."""
        return asdict(self)


class Weighed(Protocol):
    """The weights of two sides by name, golden first."""

    def get(self, side: int, name: str) -> Floats | None:
        """A weight as numbers; None if it is not there."""

    def both(self, name: str) -> tuple[Floats, Floats] | None:
        """A weight of both sides, of one shape."""


class Weights:
    """The whole weights of two runs, read when they are asked for."""

    def __init__(self, golden: StepTensors, run: StepTensors) -> None:
        self._sides = golden, run
        self._known: dict[tuple[int, str], Whole | None] = {}

    def get(self, side: int, name: str) -> Floats | None:
        """A weight as numbers; None if it is not there or was not saved."""
        if (side, name) not in self._known:
            self._known[side, name] = self._sides[side].whole(("parameter", name, "weight", ""))
        found = self._known[side, name]
        return None if found is None else found.values()

    def both(self, name: str) -> tuple[Floats, Floats] | None:
        """A weight of both sides, of one shape."""
        a, b = self.get(0, name), self.get(1, name)
        return (a, b) if a is not None and b is not None and a.shape == b.shape else None


def alike(a: Floats, b: Floats | None) -> bool:
    """Equal, up to the rounding of the coarser of two formats."""
    if b is None or a.shape != b.shape:
        return False
    return bool(np.linalg.norm(a - b) <= _CLOSE * np.linalg.norm(a))


def causes_of_weights(
    weights: Weighed, differing: Sequence[str], lonely: Mapping[str, str], sizes: Sizes
) -> list[Cause]:
    """Why these weights differ; `lonely` are those that one side does not have: golden or run."""
    found: list[Cause] = []
    explained: set[str] = set()
    for order in (_layer_order, _expert_order):
        for cause, names in order(weights, differing):
            found.append(cause)
            explained.update(names)
    for name in differing:
        if name in explained:
            continue
        pair = weights.both(name)
        named = None if pair is None else _of_one(name, *pair, weights, sizes)
        if named is not None:
            found.append(named)
            explained.add(name)
    found += _lonely(weights, lonely)
    left = [name for name in differing if name not in explained]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        found.append(Cause("weights", f"the weights differ: {left[0]}{more}", left[0]))
    return _merged(found)


def _merged(causes: Sequence[Cause]) -> list[Cause]:
    """One cause for the same fault in several layers."""
    kept: dict[str, list[Cause]] = {}
    for cause in causes:
        kept.setdefault(cause.id, []).append(cause)
    return [
        items[0] if len(items) == 1 else Cause(items[0].id, f"{items[0].text} (and {len(items) - 1} more)", items[0].at)
        for items in kept.values()
    ]


def _layer_order(weights: Weighed, differing: Sequence[str]) -> Iterator[tuple[Cause, list[str]]]:
    yield from _order(weights, differing, _LAYER, "layer-order", "layer")


def _expert_order(weights: Weighed, differing: Sequence[str]) -> Iterator[tuple[Cause, list[str]]]:
    yield from _order(weights, differing, _EXPERT, "expert-order", "expert")


def _order(
    weights: Weighed, differing: Sequence[str], pattern: re.Pattern[str], name: str, word: str
) -> Iterator[tuple[Cause, list[str]]]:
    """Weights of one number that are those of another number on the other side, in all their matrices."""
    moved: dict[tuple[str, int, int], list[str]] = {}
    numbers: dict[str, set[int]] = {}
    for weight in differing:
        if match := pattern.match(weight):
            numbers.setdefault(match[1], set()).add(int(match[2]))
    for weight in differing:
        match = pattern.match(weight)
        golden = weights.get(0, weight)
        if match is None or golden is None or golden.ndim < 2:
            continue
        for other in sorted(numbers[match[1]] - {int(match[2])}):
            if alike(golden, weights.get(1, f"{match[1]}.{other}.{match[3]}")):
                moved.setdefault((match[1], int(match[2]), other), []).append(weight)
                break
    for (stem, here, there), names in sorted(moved.items()):
        of_number = [w for w in differing if w.startswith(f"{stem}.{here}.")]
        matrices = [w for w in of_number if (g := weights.get(0, w)) is not None and g.ndim > 1]
        if len(names) >= _MOST * len(matrices):
            where = "" if word == "layer" else f" of {stem.removesuffix('.local_experts')}"
            text = f"{word} {here}{where} of the golden run is {word} {there} of the run"
            yield Cause(name, text, f"{stem}.{here}"), of_number


def _of_one(name: str, a: Floats, b: Floats, weights: Weighed, sizes: Sizes) -> Cause | None:
    """The cause of one weight that differs: the first that fits."""
    tries: tuple[Callable[[], Cause | None], ...] = (
        lambda: _of_qkv(name, a, b, sizes) if "linear_qkv" in name else None,
        lambda: _of_gate(name, a, b) if "linear_fc1" in name and len(a) % 2 == 0 else None,
        lambda: _of_vocabulary(name, a, b) if "word_embeddings" in name or "output_layer" in name else None,
        lambda: _of_tied(weights) if name == "output_layer.weight" else None,
        lambda: _of_values(name, a, b),
        lambda: _of_rows(name, a, b),
    )
    return next((cause for attempt in tries if (cause := attempt()) is not None), None)


def _of_gate(name: str, a: Floats, b: Floats) -> Cause | None:
    half = len(a) // 2
    if alike(np.concatenate((a[half:], a[:half])), b):
        return Cause("gate-up-swapped", f"gate and up are swapped in {name}", name)
    if alike(np.stack((a[:half], a[half:]), 1).reshape(a.shape), b):
        return Cause("gate-up-alternating", f"gate and up alternate row by row in {name}", name)
    return None


def _of_vocabulary(name: str, a: Floats, b: Floats) -> Cause | None:
    shift = _shift(a, b)
    text = f"rows of {name} are {shift:+d} places off: row i of golden is row i{shift:+d} of the run"
    return Cause("vocabulary-offset", text, name) if shift else None


def _of_values(name: str, a: Floats, b: Floats) -> Cause | None:
    if a.ndim == 2 and a.shape[0] == a.shape[1] and alike(a.T, b):
        return Cause("transposed", f"{name} is transposed", name)
    if not b.any() and a.any():
        missing = "missing-bias" if name.endswith("bias") else "missing-weight"
        return Cause(missing, f"{name} is all zeros in the run", name)
    for sign in (1, -1):
        if alike(a + sign, b):
            return Cause("zero-centred-norm", f"{name} is {sign:+d} off: a norm that adds 1 to its weight", name)
    factor = float((a * b).sum() / max(float((a * a).sum()), 1e-300))
    if factor > 0 and abs(factor - 1) > _CLOSE and alike(a * factor, b):
        return Cause("scaled", f"{name} is {factor:.4g} times that of the golden run", name)
    return None


def _heads(x: Floats, sizes: Sizes) -> list[Floats]:
    """Queries, keys and values of a fused weight of Megatron."""
    per_group = sizes.heads // sizes.groups + 2
    width = len(x) // (sizes.groups * per_group)
    grouped = x.reshape(sizes.groups, per_group, width, *x.shape[1:])
    return [
        grouped[:, :-2].reshape(-1, width, *x.shape[1:]),
        grouped[:, -2].reshape(-1, width, *x.shape[1:]),
        grouped[:, -1].reshape(-1, width, *x.shape[1:]),
    ]


def _of_qkv(name: str, a: Floats, b: Floats, sizes: Sizes) -> Cause | None:
    per_group = sizes.heads // max(sizes.groups, 1) + 2
    if not sizes.groups or len(a) % (sizes.groups * per_group):
        return None
    golden, run = _heads(a, sizes), _heads(b, sizes)
    words = ("queries", "keys", "values")
    for i, j in ((0, 1), (1, 2), (0, 2)):
        if alike(golden[i], run[j]) and alike(golden[j], run[i]):
            short = "qkv"[i] + "-" + "qkv"[j]
            return Cause(f"{short}-swapped", f"{words[i]} and {words[j]} are swapped in {name}", name)
    blocks = np.concatenate([part.reshape(-1, *a.shape[1:]) for part in golden])
    if alike(blocks, b):
        text = f"{name} holds all queries, then all keys, then all values; Megatron wants them group by group"
        return Cause("qkv-blocks", text, name)
    for i, part in enumerate(golden):
        if alike(part, run[i]) or i == 2:
            continue
        for order, inner in (("interleaved", _halves_to_pairs(part)), ("halves", _pairs_to_halves(part))):
            if alike(inner, run[i]):
                text = f"rotary dimensions of the {words[i]} are permuted to {order} in {name}"
                return Cause("rope-interleaving", text, name)
    places = _matched([head for part in golden for head in part], [head for part in run for head in part])
    if places is not None:
        first = next(i for i, place in enumerate(places) if place != i)
        text = (
            f"the heads of {name} are the same in another order (head {first} of golden is head {places[first]}):"
            " check how heads are interleaved with their groups"
        )
        return Cause("gqa-interleaving", text, name)
    return None


def _halves_to_pairs(part: Floats) -> Floats:
    half = part.shape[1] // 2
    return np.stack((part[:, :half], part[:, half:]), 2).reshape(part.shape)


def _pairs_to_halves(part: Floats) -> Floats:
    return np.concatenate((part[:, ::2], part[:, 1::2]), 1)


def _matched(left: Sequence[Floats], right: Sequence[Floats]) -> list[int] | None:
    """Where each item of `left` is in `right`; None unless each is there once and some have moved."""
    if len({item.shape for item in (*left, *right)}) != 1:
        return None
    known = {np.ascontiguousarray(item).tobytes(): i for i, item in enumerate(right)}
    places = [known.get(np.ascontiguousarray(item).tobytes(), -1) for item in left]
    moved = sorted(places) == list(range(len(right))) and places != list(range(len(right)))
    return places if moved else None


def _shift(a: Floats, b: Floats) -> int:
    """By how many rows `b` is shifted against `a`; 0 if it is not."""
    known = {np.ascontiguousarray(row).tobytes(): i for i, row in enumerate(b)}
    found = [known[key] - i for i, row in enumerate(a) if (key := np.ascontiguousarray(row).tobytes()) in known]
    if len(found) < len(a) / 2:
        return 0
    values, counts = np.unique(found, return_counts=True)
    best = int(values[counts.argmax()])
    return best if counts.max() >= _MOST * len(found) else 0


def _of_tied(weights: Weighed) -> Cause | None:
    """One side ties its output layer to the embedding, the other does not."""
    for side, name in ((0, "golden run"), (1, "run")):
        tied = [weights.get(s, "embedding.word_embeddings.weight") for s in (side, 1 - side)]
        outputs = [weights.get(s, "output_layer.weight") for s in (side, 1 - side)]
        own = tied[0] if outputs[0] is None else outputs[0]
        if tied[0] is None or tied[1] is None or outputs[1] is None or own is None:
            continue
        if alike(tied[0], own) and not alike(tied[1], outputs[1]):
            text = f"the {name} ties its output layer to the embedding; the other side has a weight of its own"
            return Cause("tied-embeddings", text, "output_layer.weight")
    return None


def _of_rows(name: str, a: Floats, b: Floats) -> Cause | None:
    places = _matched(list(a), list(b)) if a.ndim > 1 else None
    if places is None:
        return None
    first = next(i for i, place in enumerate(places) if place != i)
    return Cause(
        "rows-permuted", f"{name} has the same rows in another order (row {first} is row {places[first]})", name
    )


def _lonely(weights: Weighed, lonely: Mapping[str, str]) -> Iterator[Cause]:
    for name, side in lonely.items():
        where = "the run" if side == "golden" else "the golden run"
        if name == "output_layer.weight":
            tied = _of_tied(weights)
            if tied is not None:
                yield tied
            continue
        kind = "missing-bias" if name.endswith("bias") else "missing-weight"
        yield Cause(kind, f"{name} is not in {where}", name)


def causes_of_settings(
    settings: Mapping[str, Any], golden: Mapping[str, Any], run: Mapping[str, Any], places: Sequence[str]
) -> list[Cause]:
    """Settings that differ, those first that show at one of these tensors; the first tensor counts most."""
    found = []
    for setting in settings.values():
        ours = run.get(setting.ours)
        theirs = next((v for key in setting.theirs if (v := nested(golden, key)) is not None), setting.default)
        if ours is None or theirs is None or _equal(ours, theirs):
            continue
        shown = [place for place in places if setting.at in place]
        text = f"{setting.named} {_short(theirs)} against {_short(ours)}"
        found.append(
            (
                places.index(shown[0]) if shown else len(places),
                Cause(f"setting:{setting.ours}", text, shown[0] if shown else ""),
            )
        )
    return [cause for _, cause in sorted(found, key=lambda item: item[0])]


def nested(values: Mapping[str, Any], path: str) -> Any:
    """A value by its path with dots."""
    found: Any = values
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return bool(a) == bool(b)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return abs(a - b) <= 1e-9 * max(abs(a), abs(b))
    return str(a) == str(b)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
