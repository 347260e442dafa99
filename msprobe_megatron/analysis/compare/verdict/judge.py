"""Judging: the relative error of every matched tensor, and whether rounding explains it.

Pure functions on the columns of `match`. An error is measured in units that cannot vanish by cancellation (see
`tolerance`), so that a mean near zero is never the reason of a verdict. Numbers of NaN and infinities must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analyse.match import Pairs
from msprobe_megatron.analyse.tolerance import EPS32, Allowed, Floats

Flags = npt.NDArray[np.bool_]

_TINY = 1e-300
_BAD = ("n_nan", "n_posinf", "n_neginf")


@dataclass
class Judgement:
    """One entry a pair of tensors; `layout` holds the reason where they cannot be compared, else an empty text.

    `replica` marks what differs between the ranks of one run that should hold the same numbers, `element` errors that
    are those of single elements, from sketches or saved tensors.
    """

    error: Floats
    tolerance: Floats
    diverged: Flags
    replica: Flags
    element: Flags
    layout: npt.NDArray[np.object_]


def judge(pairs: Pairs, allowed: Allowed, padded_vocabulary: tuple[int, int] | None = None) -> Judgement:
    """Errors and verdicts of all pairs; of each tensor the figure that is furthest beyond what is allowed.

    Example::

        judge(pairs, tolerances(pairs, scene)).diverged.sum()
    """
    both = pairs["left_has"].astype(bool) & pairs["right_has"].astype(bool)
    layout = _reasons(pairs, both, padded_vocabulary)
    scale = scales(pairs)
    error, tolerance = _worse(errors(pairs, scale), allowed)
    apart = _element_errors(pairs, scale, allowed)
    by_element = np.nan_to_num(apart / allowed.element, posinf=np.inf) > error / tolerance
    error, tolerance = np.where(by_element, apart, error), np.where(by_element, allowed.element, tolerance)
    between, between_allowed = _worse(_replica_errors(pairs, scale), allowed)
    comparable = both & (layout == "")
    diverged = comparable & (error > tolerance)
    same, other = _bits(pairs)
    # One flipped bit of a large weight is below what its statistics can show; its digest shows it all the same.
    flipped = comparable & other & ~diverged & (pairs["kind"] == "parameter") & (allowed.average < 8 * EPS32)
    error = np.where(flipped, 2 * tolerance, error)
    replica = both & (between > between_allowed) & (pairs["reason_r"] == "")
    by_replica = replica & ~diverged
    return Judgement(
        error=np.where(by_replica, between, error),
        tolerance=np.where(by_replica, between_allowed, tolerance),
        diverged=(diverged & ~same) | flipped | (replica & comparable),
        replica=replica,
        element=by_element & ~by_replica,
        layout=layout,
    )


def _worse(found: tuple[Floats, Floats], allowed: Allowed) -> tuple[Floats, Floats]:
    """Of averages and extremes the one that is further beyond what is allowed."""
    average, extreme = found
    by_extreme = extreme / allowed.extreme > average / allowed.average
    return np.where(by_extreme, extreme, average), np.where(by_extreme, allowed.extreme, allowed.average)


def _bits(pairs: Pairs) -> tuple[Flags, Flags]:
    """Where digests are equal, and where there are two that differ."""
    digests = list(zip(pairs["digest_l"], pairs["digest_r"], strict=True))
    known = np.array([a is not None and b is not None for a, b in digests], bool) & (pairs["dims_l"] == pairs["dims_r"])
    same = np.array([a == b for a, b in digests], bool)
    if pairs.tensors is None:
        return known & same, known & ~same
    # Elements say it too, and whether digests were asked for or not.
    differing = pairs.tensors.column("differing") + pairs.tensors.column("unlike")
    comparable = pairs["dtype_l"] == pairs["dtype_r"]
    return (known & same) | (comparable & (differing == 0)), (known & ~same) | (comparable & (differing > 0))


def _element_errors(pairs: Pairs, scale: Floats, allowed: Allowed) -> Floats:
    """Norm of the difference over the norm; of saved tensors also the largest difference over the largest number."""
    apart: Floats = pairs["distance"] / np.maximum(scale, _TINY)
    if pairs.tensors is None:
        return apart
    largest = pairs.tensors.column("largest") / np.maximum(_largest(pairs, scale), _TINY)
    worse: Floats = np.fmax(apart, largest * allowed.element / allowed.extreme)
    return np.where(pairs.tensors.column("unlike") > 0, np.inf, worse)


def distances(pairs: Pairs) -> tuple[Floats, Floats]:
    """How far a run is from its repetition: averages, and extremes or single elements, in the units of tolerances.

    Example::

        average, extreme = distances(match(golden, repetition))
    """
    scale = scales(pairs)
    average, extreme = errors(pairs, scale)
    single = np.nan_to_num(pairs["distance"] / np.maximum(scale, _TINY))
    if pairs.tensors is not None:
        largest = pairs.tensors.column("largest", 0.0) / np.maximum(_largest(pairs, scale), _TINY)
        single = np.maximum(single, largest)
    return average, np.maximum(extreme, single)


def errors(pairs: Pairs, scale: Floats) -> tuple[Floats, Floats]:
    """Relative errors of norm or sum, and of the extremes; infinite where numbers of non-finite elements differ."""
    numel = np.maximum(pairs["numel_l"], pairs["numel_r"]).astype(np.float64)
    norm_l, norm_r = _norm(pairs["sumsq_l"]), _norm(pairs["sumsq_r"])
    largest = _largest(pairs, scale)
    average: Floats = np.maximum.reduce(
        [
            np.abs(norm_l - norm_r) / np.maximum(scale, _TINY),
            np.abs(_zero(pairs["sum_l"]) - _zero(pairs["sum_r"])) / np.maximum(np.sqrt(numel) * scale, _TINY),
            np.abs(pairs["numel_l"] - pairs["numel_r"]) / np.maximum(numel, 1),
            _part_errors(pairs),
        ]
    )
    for name in _BAD:
        average = np.where(_zero(pairs[f"{name}_l"]) != _zero(pairs[f"{name}_r"]), np.inf, average)
    extreme = np.maximum(_apart(pairs, "min"), _apart(pairs, "max")) / np.maximum(largest, _TINY)
    return np.where(np.isnan(average), np.inf, average), np.where(np.isnan(extreme), np.inf, extreme)


def _largest(pairs: Pairs, scale: Floats) -> Floats:
    """The largest number of either side; where the norm was replaced by a larger scale, it follows it."""
    own = np.maximum(_norm(pairs["sumsq_l"]), _norm(pairs["sumsq_r"]))
    largest = np.maximum(_zero(pairs["absmax_l"]), _zero(pairs["absmax_r"]))
    followed: Floats = largest * np.where(own > 0, scale / np.maximum(own, _TINY), 1.0)
    return followed


def _part_errors(pairs: Pairs) -> Floats:
    """Relative errors of the largest and the smallest part: one wrong rank of many hardly shows in the whole."""
    if not pairs.same_cuts:
        return np.zeros(len(pairs))
    cut = (pairs["parts_l"] == pairs["parts_r"]) & (pairs["parts_l"] > 1) & (pairs["kind"] != "grad_reduced")
    found = np.zeros(len(pairs))
    for name in ("part_high", "part_low"):
        left, right = _norm(pairs[f"{name}_l"]), _norm(pairs[f"{name}_r"])
        found = np.maximum(found, np.abs(left - right) / np.maximum(np.maximum(left, right), _TINY))
    return np.where(cut & np.isin(pairs["tokens"], ("samples", "fixed")), found, 0.0)


def scales(pairs: Pairs) -> Floats:
    """What an error of the norm is measured against: the norm, and for weight gradients at least their noise scale.

    A weight gradient adds up dY X over all tokens and may cancel to nothing (a key's bias does, exactly): its rounding
    follows what was added up, |dY| |X| / sqrt(tokens), not what is left.
    """
    scale = np.maximum(_norm(pairs["sumsq_l"]), _norm(pairs["sumsq_r"]))
    targets = np.flatnonzero(pairs["kind"] == "grad_reduced")
    if not len(targets):
        return scale
    owners = {name.rpartition(".")[0] for name in pairs["name"][targets]}
    squares: dict[tuple[int, str], float] = {}
    moving: dict[tuple[int, int, str], list[float]] = {}
    relevant = np.flatnonzero(
        np.isin(pairs["name"], list(owners))
        & np.isin(pairs["kind"], ("activation", "gradient"))
        & ((pairs["kind"] == "activation") | (pairs["io"] == "output"))
        & (pairs["phase"] != "recompute")
    )
    for i in relevant:
        key = (int(pairs["step"][i]), int(pairs["block"][i]), str(pairs["name"][i]))
        entry = moving.setdefault(key, [0.0, 0.0, 1.0])
        value = float(np.nan_to_num(pairs["sumsq_l"][i]))
        gradient = pairs["kind"][i] == "gradient"
        if gradient:
            shape = pairs["global_shape_l"][i]
            width = int(shape[-1]) if shape is not None and len(shape) else 1
            entry[2] = max(1.0, float(np.nan_to_num(pairs["numel_l"][i])) / max(width, 1))
        entry[gradient] = max(entry[gradient], value)
    for (step, _, name), (inputs, gradients, tokens) in moving.items():
        squares[step, name] = squares.get((step, name), 0.0) + inputs * gradients / tokens
    for i in targets:
        owner = str(pairs["name"][i]).rpartition(".")[0]
        scale[i] = max(scale[i], squares.get((int(pairs["step"][i]), owner), 0.0) ** 0.5)
    return scale


def _replica_errors(pairs: Pairs, scale: Floats) -> tuple[Floats, Floats]:
    """Relative errors between the ranks of the second run that hold the same part."""
    numel = np.maximum(_zero(pairs["numel_r"]), 1)
    average: Floats = np.maximum(
        _zero(pairs["d_norm_r"]) / np.maximum(scale, _TINY),
        _zero(pairs["d_sum_r"]) / np.maximum(np.sqrt(numel) * scale, _TINY),
    )
    average = np.where(_zero(pairs["d_counts_r"]) > 0, np.inf, average)
    return average, _zero(pairs["d_extreme_r"]) / np.maximum(_zero(pairs["absmax_r"]), _TINY)


def _reasons(pairs: Pairs, both: Flags, padded: tuple[int, int] | None) -> npt.NDArray[np.object_]:
    left = np.array([text or "" for text in pairs["reason_l"]], object)
    right = np.array([text or "" for text in pairs["reason_r"]], object)
    reasons = np.where(left != "", left, right)
    for i in np.flatnonzero(both & (pairs["numel_l"] != pairs["numel_r"]) & (pairs["tokens"] != "experts")):
        if reasons[i] == "":
            reasons[i] = _shape_reason(pairs, int(i), padded)
    return reasons


def _shape_reason(pairs: Pairs, i: int, padded: tuple[int, int] | None) -> str:
    shapes = [pairs[f"global_shape_{side}"][i] for side in "lr"]
    if any(shape is None for shape in shapes):
        return f"{int(pairs['numel_l'][i])} elements against {int(pairs['numel_r'][i])}"
    left, right = [tuple(int(n) for n in shape) for shape in shapes]
    if padded is not None and len(left) == len(right):
        unlike = [(a, b) for a, b in zip(left, right, strict=True) if a != b]
        if unlike == [padded]:
            return f"vocabulary padded to {padded[0]} and to {padded[1]}"
    return f"shape {left} against {right}"


def _norm(squares: Floats) -> Floats:
    norm: Floats = np.sqrt(np.maximum(_zero(squares), 0.0))
    return norm


def _zero(column: npt.NDArray[np.generic]) -> Floats:
    return np.nan_to_num(column.astype(np.float64), nan=0.0)


def _apart(pairs: Pairs, name: str) -> Floats:
    """Difference of two extremes; both absent (nothing finite in either) is no difference."""
    left, right = pairs[f"{name}_l"].astype(np.float64), pairs[f"{name}_r"].astype(np.float64)
    return np.where(np.isnan(left) & np.isnan(right), 0.0, np.abs(left - right))
