"""Layouts of API calls: derived at comparison time from the two runs, because a call records none.

Precedes `merge` where the layouts of two runs differ. For statistics it is enough to know over which axes a tensor is
cut, and the two runs show that together: if a rank of TP2 holds half of the elements that the same call of the other
run has, its tensor is cut over TP. The rules, in this order; what none of them decides keeps its reason and is not
compared:

- A call is the same call in both runs only if its module makes equally many calls of that function in both.
- The numbers of elements of both runs decide over which of TP and CP each run is cut. Where several answers are
  possible (TP and CP of one size), the axis along which all ranks hold equal values is not the cut one.
- Tensors of equal shape are replicas, or summands of a partial sum. They are summands only where an operator can leave
  them unreduced (products, embeddings, reductions, inputs of a reduction; any gradient), where the ranks differ, and
  where their sums add up to the sum of the other run. Of summands only the sum is compared.
- Ranks that differ otherwise are reported as different if they must be equal: the inputs of the call are equal on
  these ranks, or the same call of another layer is. If neither is known, the call is not compared; its module is.
- A tensor that is the same in every microbatch belongs to no samples (weights, masks); any other to the samples of its
  microbatch. Tensors of experts, whose first dimension varies, hold the tokens that were sent to them.

The layout is that of the call, not of one tensor: other layers and microbatches decide too. So a fault in one place
cannot be taken for another layout there.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import duckdb

from msprobe_megatron.analysis.compare.call_tensors import (
    RECORDED,
    CallTensor,
    Key,
    Side,
    function_of,
    has_calls,
    read_calls,
    with_specs,
)
from msprobe_megatron.analysis.load.run import Run

_HALF = {"bfloat16": 2.0**-7, "float16": 2.0**-10}

_AXES = ("tp", "cp")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_FLOATS = ("float", "bfloat")
# Operators that can leave partial sums behind where their inputs are cut, and reductions, which take them.
_SUMMING = re.compile(r"linear|matmul|(^|[._])(b?mm|baddbmm|addmm|dot|mv|einsum|sum|mean|norm)$|embedding|conv", re.I)
_REDUCING = re.compile(r"Reduce", re.I)
_GATHERING = re.compile(r"AllGatherTokenDispatcher")
# Trackers of losses are numbers to which every microbatch adds its own.
_IN_PLACE = re.compile(r"\.(add_|__iadd__)\.\d+$")

_SUMMANDS = "summands"
_OTHER_SHAPE = "its shape is not that of the other run cut over an axis"

_Cuts = tuple[frozenset[str], frozenset[str]]
"""Axes over which the tensors of both sides are cut."""


def derived_rows(
    connection: duckdb.DuckDBPyConnection, golden: Run, run: Run, rows: tuple[Any, Any]
) -> tuple[duckdb.DuckDBPyRelation, duckdb.DuckDBPyRelation]:
    """The rows of both runs, those of API calls with derived shard specs, or with the reason why there is none."""
    for side, relation in zip("lr", rows, strict=True):
        connection.register(f"recorded_{side}", relation)
    if not all(has_calls(connection, side) for side in "lr"):
        return rows[0], rows[1]
    specs = Derivation(read_calls(connection, "l", golden), read_calls(connection, "r", run)).specs()
    return with_specs(connection, "l", specs[0]), with_specs(connection, "r", specs[1])


def is_sum(shard: str) -> bool:
    """True for a derived spec of summands, which are compared by their sum only."""
    return f"{_SUMMANDS}[" in shard


class Derivation:
    """The specs of all calls of a pair of runs."""

    def __init__(self, left: Side, right: Side) -> None:
        self._sides = left, right
        self._keys = [key for key in left.tensors if key in right.tensors]
        self._by_call: dict[str, list[Key]] = defaultdict(list)
        self._alike: dict[Key, list[Key]] = defaultdict(list)
        for key in self._keys:
            self._by_call[key[1]].append(key)
            self._alike[_pattern(key)].append(key)
        experts = {name.partition(".local_experts.")[0] for _, name, _, _ in self._keys if ".local_experts." in name}
        self._with_experts = {*experts, *(name.removesuffix(".experts") for name in experts)}
        self._layouts: dict[Key, _Cuts] = {}
        self._reasons: dict[Key, str] = {}

    def specs(self) -> tuple[dict[Key, str], dict[Key, str]]:
        """Spec of every tensor that both sides have, for each side."""
        for key in sorted(self._keys):  # activations come before their gradients
            found = self._cuts(key)
            if isinstance(found, str):
                self._reasons[key] = found
            else:
                self._layouts[key] = found
        summed = self._summands()
        found_specs: tuple[dict[Key, str], dict[Key, str]] = ({}, {})
        for key in self._keys:
            reason = self._reasons.get(key) or self._unexplained(key, summed)
            for number, side in enumerate(self._sides):
                spec = f"{RECORDED}: {reason}" if reason else self._spec(key, number, side, key in summed)
                found_specs[number][key] = spec
        return found_specs

    def _cuts(self, key: Key) -> _Cuts | str:
        """Over which axes each side is cut, from numbers of elements; or the reason why that is not known."""
        left, right = (side.tensors[key] for side in self._sides)
        reason = self._not_the_same(key, left, right)
        if reason:
            return reason
        axes = ("etp",) if _of_expert(key) else _AXES
        first = 1 if self._ragged(key) else 0
        shapes = left.shape[first:], right.shape[first:]
        answers = [
            (cuts, self._surprises(cuts, (left, right), axes))
            for cuts in self._candidates(axes)
            if self._fits(cuts, shapes)
        ]
        if not answers:
            return _OTHER_SHAPE
        least = min(surprises for _, surprises in answers)
        best = [cuts for cuts, surprises in answers if surprises == least]
        # The gradient of a tensor is cut like the tensor.
        own = self._layouts.get(("activation", *key[1:]))
        if len(best) > 1 and own not in best:
            return "the axis that it is cut over cannot be told from shapes"
        return best[0] if len(best) == 1 or own is None else own

    def _fits(self, cuts: _Cuts, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
        """True if the shapes of both sides are what these cuts leave of one whole tensor."""
        alike = {axis for axis in cuts[0] & cuts[1] if self._sides[0].size(axis) == self._sides[1].size(axis)}
        parts = [_product(side, cut - alike) for side, cut in zip(self._sides, cuts, strict=True)]
        if (cuts[0] & cuts[1]) - alike:
            return math.prod(shapes[0]) * parts[0] == math.prod(shapes[1]) * parts[1]
        whole = math.prod(max(extents) for extents in zip(*shapes, strict=True))
        return all(math.prod(shape) * count == whole for shape, count in zip(shapes, parts, strict=True))

    def _not_the_same(self, key: Key, left: CallTensor, right: CallTensor) -> str:
        """The reason why shapes and values of this tensor say nothing about its layout; empty if they do."""
        function = function_of(key[1])
        counts = [side.calls[function] for side in self._sides]
        same_samples = all(self._sides[0].size(axis) == self._sides[1].size(axis) for axis in ("dp", "cp"))
        several_dp = any(_product(side, ("dp", "cp")) > 1 for side in self._sides)
        summing_experts = any(side.size("etp") > 1 for side in self._sides) and left.shape[1:] == right.shape[1:]
        ragged, varies = self._ragged(key), left.varies or right.varies
        found = {
            "the function is called more often in one run than in the other": len({*counts[0], *counts[1]}) > 1,
            "several model chunks of a rank make the call": left.repeated or right.repeated,
            _OTHER_SHAPE: len(left.shape) != len(right.shape),
            "its shape varies": max(left.shapes, right.shapes) > 1 and not ragged,
            "the training script may scale it by the number of ranks": function[0] == "outside" and not same_samples,
            "accumulated over the microbatches of a rank": not same_samples
            and math.prod(left.shape) <= 1
            and _IN_PLACE.search(key[1]) is not None,
            "gathered from the data-parallel ranks of the experts": several_dp
            and self._dispatching(key)
            and _GATHERING.search(key[1]) is not None,
            "bytes, such as the state of a random generator": left.dtype == "uint8",
            "counts and positions of the tokens of this rank": self._dispatching(key)
            and not left.dtype.startswith(_FLOATS),
            "summed over the tokens of all data-parallel ranks": _of_expert(key)
            and not ragged
            and varies
            and several_dp,
            "the ranks of an expert may hold summands": (_of_expert(key) or ragged) and summing_experts,
        }
        return next((reason for reason, holds in found.items() if holds), "")

    def _dispatching(self, key: Key) -> bool:
        """True for a call of a module that holds experts: it sends tokens to them, where their number varies."""
        return key[1].partition("/")[0] in self._with_experts

    def _ragged(self, key: Key) -> bool:
        """True if the first dimension counts the tokens of experts: somewhere it varies."""
        if not _of_expert(key) and not self._dispatching(key):
            return False
        tensors = [side.tensors[other] for side in self._sides for other in self._alike[_pattern(key)]]
        firsts = {tensor.shape[:1] for tensor in tensors}
        return (len(firsts) > 1 or any(tensor.shapes > 1 for tensor in tensors)) and all(t.ragged for t in tensors)

    def _candidates(self, axes: tuple[str, ...]) -> Iterable[_Cuts]:
        left, right = ([axis for axis in axes if side.size(axis) > 1] for side in self._sides)
        return ((one, other) for one in _subsets(left) for other in _subsets(right))

    def _surprises(self, cuts: _Cuts, tensors: tuple[CallTensor, CallTensor], axes: tuple[str, ...]) -> int:
        """How much equal and unequal ranks are not what these cuts let expect."""
        found = 0
        for axis in axes:
            held = [side.size(axis) > 1 for side in self._sides]
            unequal = [axis in tensor.unequal for tensor in tensors]
            if all(held) and axis in cuts[0] and axis in cuts[1]:
                # Shapes do not show a cut that both runs share: the values of both must.
                found += 0 if all(unequal) else len(cuts) + 1
            else:
                found += sum((axis in cut) != differ for cut, differ, on in zip(cuts, unequal, held, strict=True) if on)
        return found

    def _summands(self) -> set[Key]:
        """Tensors that are partial sums on one side: the ranks differ where they hold one part, and the sums add up."""
        summed: set[Key] = set()
        for keys in self._alike.values():
            candidates = [key for key in keys if key in self._layouts and self._may_be_summands(key)]
            if any(self._adds_up(key) for key in candidates):
                summed.update(candidates)
        return summed

    def _differing(self, key: Key, number: int) -> set[str]:
        """Axes along which ranks differ although they hold the same part of the tensor."""
        side, cut = self._sides[number], self._layouts[key][number]
        axes = [axis for axis in _AXES if side.size(axis) > 1 and axis not in cut]
        return side.tensors[key].unequal.intersection(axes)

    def _may_be_summands(self, key: Key) -> bool:
        kind, name, io, _ = key
        tensor = self._sides[0].tensors[key]
        if self._ragged(key) or not tensor.varies or not tensor.dtype.startswith(_FLOATS):
            return False
        if not (self._differing(key, 0) or self._differing(key, 1)):
            return False
        if kind == "gradient" or name.startswith("outside/"):
            return True
        return bool((_REDUCING if io == "input" else _SUMMING).search(tensor.op))

    def _adds_up(self, key: Key) -> bool:
        """True if the sums of all ranks, each part once, are those of the other run."""
        totals, scale = [], 0.0
        for number, side in enumerate(self._sides):
            tensor, differing = side.tensors[key], self._differing(key, number)
            kept = self._layouts[key][number] | differing
            copies = math.prod(side.size(axis) for axis in _AXES if axis not in kept)
            factor = float(side.run.facts.get("gradient_scale") or 1.0) if key[0] == "gradient" else 1.0
            totals.append(tensor.total / copies / factor)
            scale = max(scale, math.sqrt(tensor.numel * tensor.squares) / copies / factor)
        tensor = self._sides[0].tensors[key]
        shared = min(0.1 + 4 / math.sqrt(max(tensor.numel, 1)), 1.0)
        limit = 4 * _HALF.get(tensor.dtype, 0.0) * shared + 1e-5
        return scale > 0 and abs(totals[0] - totals[1]) <= limit * scale

    def _unexplained(self, key: Key, summed: set[Key]) -> str:
        """The reason why ranks that differ may do so; empty if they are equal, are summands, or must be equal."""
        if key in summed or _of_expert(key) or self._ragged(key):
            return ""
        for number, side in enumerate(self._sides):
            tensor = side.tensors[key]
            stages = {"pp"} & tensor.unequal
            for axis in self._differing(key, number) | stages:
                if not self._must_be_equal(key, side, axis):
                    return "its ranks hold different values"
        return ""

    def _must_be_equal(self, key: Key, side: Side, axis: str) -> bool:
        alike = [side.tensors[other] for other in self._alike[_pattern(key)]]
        if not side.tensors[key].dtype.startswith(_FLOATS):
            # Indices and counts of a rank's own part may be equal by chance, in one layer or another.
            return sum(axis not in tensor.unequal for tensor in alike) > len(alike) / 2
        if any(axis in tensor.equal for tensor in alike):
            return True
        kind, name, io, _ = key
        if kind != "activation" or io != "output" or axis == "pp":
            return False
        inputs = [side.tensors[other] for other in self._by_call[name] if other[0] == kind and other[2] == "input"]
        return bool(inputs) and all(axis not in tensor.unequal for tensor in inputs)

    def _spec(self, key: Key, number: int, side: Side, summed: bool) -> str:
        if self._ragged(key):
            tokens = "x[dp:samples]" if _of_expert(key) else "x[ep:unordered]"
        else:
            varies = any(one.tensors[key].varies for one in self._sides)
            tokens = "b[dp:samples]" if varies else "d"
        words = [tokens]
        if cut := self._layouts[key][number]:
            words.append(f"cut[{','.join(sorted(cut))}]")
        if summed and (partial := self._differing(key, number)):
            words.append(f"{_SUMMANDS}[{','.join(sorted(partial))}]")
        return " ".join(words)


def _of_expert(key: Key) -> bool:
    return ".local_experts." in key[1]


def _pattern(key: Key) -> Key:
    """The key with any layer and any expert."""
    kind, name, io, path = key
    module, _, call = name.partition("/")
    return kind, f"{_NUMBER.sub('.*', module)}/{call}", io, path


def _product(side: Side, axes: Iterable[str]) -> int:
    return math.prod(side.size(axis) for axis in axes)


def _subsets(axes: list[str]) -> list[frozenset[str]]:
    return [frozenset(chosen) for n in range(len(axes) + 1) for chosen in combinations(axes, n)]
