"""Judging: the relative error of every matched tensor, and whether it is within the rounding tolerance.

Pure functions on the columns of `match`. An error is measured in units that cannot vanish by cancellation (see
`tolerance`), so a mean near zero never decides a verdict. Numbers of NaN and infinities must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.match import Floats, Pair, Pairs
from msprobe_megatron.analysis.compare.verdict.tolerance import EPS32, Allowed

Flags = npt.NDArray[np.bool_]

_TINY = 1e-300
_NON_FINITE = ("n_nan", "n_posinf", "n_neginf")


@dataclass
class Judgement:
    """One entry per pair of tensors; `layout` holds the reason where they cannot be compared, else an empty text.

    `replica` marks tensors that differ between ranks of one run that should hold identical values, `element` errors of
    single elements, from sketches or saved tensors.
    """

    error: Floats
    tolerance: Floats
    diverged: Flags
    replica: Flags
    element: Flags
    layout: npt.NDArray[np.object_]
    found: dict[int, str] = field(default_factory=dict)
    """What was found about a pair besides its statistics."""
    ranks: dict[int, list[int]] = field(default_factory=dict)
    """Ranks that are known to be wrong, where statistics within their tolerance do not tell."""


def judge(
    pairs: Pairs,
    allowed: Allowed,
    padded_vocabulary: tuple[int, int] | None = None,
    between_replicas: Allowed | None = None,
) -> Judgement:
    """Errors and verdicts of all pairs; of each tensor the statistic with the largest error / tolerance.

    `between_replicas` is what ranks of one run may differ by, if that is less than `allowed` between the runs.
    """
    both = pairs.in_both()
    layout = _reasons(pairs, both, padded_vocabulary)
    scale = scales(pairs)
    error, tolerance = _worse(errors(pairs, scale), allowed)
    apart = _element_errors(pairs, scale, allowed)
    by_element = np.nan_to_num(apart / allowed.element, posinf=np.inf) > error / tolerance
    error, tolerance = np.where(by_element, apart, error), np.where(by_element, allowed.element, tolerance)
    between, between_allowed = _worse(_replica_errors(pairs, scale), between_replicas or allowed)
    comparable = both & (layout == "")
    diverged = comparable & (error > tolerance)
    same, other = bits_of_pairs(pairs)
    # One flipped bit of a large weight is too small for its statistics, but changes its digest.
    flipped = comparable & other & ~diverged & (pairs["kind"] == "parameter") & (allowed.average < 8 * EPS32)
    error = np.where(flipped, 2 * tolerance, error)
    replica = both & (between > between_allowed) & (pairs.both("reason").right == "")
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
    """Of averages and extremes the one with the larger error / tolerance."""
    average, extreme = found
    by_extreme = extreme / allowed.extreme > average / allowed.average
    return np.where(by_extreme, extreme, average), np.where(by_extreme, allowed.extreme, allowed.average)


def bits_of_pairs(pairs: Pairs) -> tuple[Flags, Flags]:
    """Pairs whose digests or saved elements are equal, and pairs of which they differ."""
    digests, dims, dtypes = list(zip(*pairs.both("digest"), strict=True)), pairs.both("dims"), pairs.both("dtype")
    known = np.array([a is not None and b is not None for a, b in digests], bool) & (dims.left == dims.right)
    same = np.array([a == b for a, b in digests], bool)
    if pairs.tensors is None:
        return known & same, known & ~same
    # Saved elements show it too, also where digests were not requested.
    differing = pairs.tensors.column("differing") + pairs.tensors.column("unlike")
    comparable = dtypes.left == dtypes.right
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
    """Distance of a run from its repetition: averages, and extremes or single elements, in the units of tolerances."""
    scale = scales(pairs)
    average, extreme = errors(pairs, scale)
    single = np.nan_to_num(pairs["distance"] / np.maximum(scale, _TINY))
    if pairs.tensors is not None:
        largest = pairs.tensors.column("largest", 0.0) / np.maximum(_largest(pairs, scale), _TINY)
        single = np.maximum(single, largest)
    return average, np.maximum(extreme, single)


def errors(pairs: Pairs, scale: Floats) -> tuple[Floats, Floats]:
    """Relative errors of norm or sum, and of the extremes; infinite where numbers of non-finite elements differ."""
    numels, norms, sums = pairs.both("numel"), pairs.both("sumsq").map(_norm), pairs.both("sum").map(_zero)
    numel = np.maximum(*numels).astype(np.float64)
    largest = _largest(pairs, scale)
    by_sum = pairs.by_sum()
    of_sum: Floats = _gap(sums) / np.maximum(np.sqrt(numel) * scale, _TINY)
    average: Floats = np.maximum.reduce(
        [
            _gap(norms) / np.maximum(scale, _TINY),
            of_sum,
            _gap(numels) / np.maximum(numel, 1),
            _part_errors(pairs),
        ]
    )
    average = np.where(by_sum, of_sum, average)
    for name in _NON_FINITE:
        # Every summand may hold the NaN that their sum has once.
        counts = pairs.both(name).map(lambda column: np.where(by_sum, _zero(column) > 0, _zero(column)))
        average = np.where(_gap(counts) != 0, np.inf, average)
    extreme = np.maximum(_extreme_gap(pairs, "min"), _extreme_gap(pairs, "max")) / np.maximum(largest, _TINY)
    extreme = np.where(by_sum, 0.0, extreme)
    return np.where(np.isnan(average), np.inf, average), np.where(np.isnan(extreme), np.inf, extreme)


def _largest(pairs: Pairs, scale: Floats) -> Floats:
    """The largest magnitude of either side, scaled up where the norm was replaced by a larger scale."""
    own = np.maximum(*pairs.both("sumsq").map(_norm))
    largest = np.maximum(*pairs.both("absmax").map(_zero))
    followed: Floats = largest * np.where(own > 0, scale / np.maximum(own, _TINY), 1.0)
    return followed


def _part_errors(pairs: Pairs) -> Floats:
    """Relative errors of the largest and the smallest part: one wrong rank of many hardly changes the whole tensor."""
    if not pairs.same_cuts:
        return np.zeros(len(pairs))
    parts = pairs.both("parts")
    cut = (parts.left == parts.right) & (parts.left > 1) & (pairs["kind"] != "grad_reduced")
    found = np.zeros(len(pairs))
    for name in ("part_high", "part_low"):
        norms = pairs.both(name).map(_norm)
        found = np.maximum(found, _gap(norms) / np.maximum(np.maximum(*norms), _TINY))
    return np.where(cut & np.isin(pairs["tokens"], ("samples", "fixed")), found, 0.0)


def scales(pairs: Pairs) -> Floats:
    """Denominator of an error of the norm: the norm, and for weight gradients at least their noise scale.

    A weight gradient adds up dY X over all tokens and may cancel to nothing (a key's bias does, exactly): its rounding
    depends on the summands, |dY| |X| / sqrt(tokens), not on the sum.
    """
    scale: Floats = np.maximum(*pairs.both("sumsq").map(_norm))
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
        value = float(np.nan_to_num(pairs.both("sumsq").left[i]))
        gradient = pairs["kind"][i] == "gradient"
        if gradient:
            shape = pairs.both("global_shape").left[i]
            width = int(shape[-1]) if shape is not None and len(shape) else 1
            entry[2] = max(1.0, float(np.nan_to_num(pairs.both("numel").left[i])) / max(width, 1))
        entry[gradient] = max(entry[gradient], value)
    for (step, _, name), (inputs, gradients, tokens) in moving.items():
        squares[step, name] = squares.get((step, name), 0.0) + inputs * gradients / tokens
    for i in targets:
        owner = str(pairs["name"][i]).rpartition(".")[0]
        scale[i] = max(scale[i], squares.get((int(pairs["step"][i]), owner), 0.0) ** 0.5)
    return _with_moments(pairs, scale, targets)


def _with_moments(pairs: Pairs, scale: Floats, targets: npt.NDArray[np.int64]) -> Floats:
    """Moments are as noisy as the gradients they are made of: relative to their size, and squares twice that."""
    own: Floats = np.maximum(*pairs.both("sumsq").map(_norm))
    noisy: dict[str, float] = {}
    for i in targets[(own[targets] > 0) & (scale[targets] > own[targets])]:
        noisy[str(pairs["name"][i])] = max(noisy.get(str(pairs["name"][i]), 1.0), float(scale[i] / own[i]))
    for i in np.flatnonzero(np.isin(pairs["kind"], ("grad_clipped", "optimizer_state"))) if noisy else ():
        ratio = noisy.get(str(pairs["name"][i]), 1.0)
        scale[i] *= 2 * ratio if ratio > 1 and pairs["io"][i] == "exp_avg_sq" else ratio
    return scale


def _replica_errors(pairs: Pairs, scale: Floats) -> tuple[Floats, Floats]:
    """Relative errors between the ranks of the second run that hold the same part."""

    def of_run(name: str) -> Floats:
        return _zero(pairs.both(name).right)

    numel = np.maximum(of_run("numel"), 1)
    average: Floats = np.maximum(
        of_run("d_norm") / np.maximum(scale, _TINY),
        of_run("d_sum") / np.maximum(np.sqrt(numel) * scale, _TINY),
    )
    average = np.where(of_run("d_counts") > 0, np.inf, average)
    return average, of_run("d_extreme") / np.maximum(of_run("absmax"), _TINY)


def _reasons(pairs: Pairs, both: Flags, padded: tuple[int, int] | None) -> npt.NDArray[np.object_]:
    own = pairs.both("reason").map(lambda column: np.array([text or "" for text in column], object))
    reasons = np.where(own.left != "", own.left, own.right)
    numels = pairs.both("numel")
    whole = (pairs["tokens"] != "experts") & ~pairs.by_sum()
    for i in np.flatnonzero(both & (numels.left != numels.right) & whole):
        if reasons[i] == "":
            reasons[i] = _shape_reason(pairs, int(i), padded)
    return reasons


def _shape_reason(pairs: Pairs, i: int, padded: tuple[int, int] | None) -> str:
    shapes = pairs.both("global_shape").map(lambda column: column[i])
    if shapes.left is None or shapes.right is None:
        return "{} elements vs {}".format(*pairs.both("numel").map(lambda column: int(column[i])))
    left, right = shapes.map(lambda shape: tuple(int(n) for n in shape))
    if padded is not None and len(left) == len(right):
        unlike = [(a, b) for a, b in zip(left, right, strict=True) if a != b]
        if unlike == [padded]:
            return f"vocabulary padded to {padded[0]} and {padded[1]}"
    return f"shape {left} vs {right}"


def _norm(squares: Floats) -> Floats:
    norm: Floats = np.sqrt(np.maximum(_zero(squares), 0.0))
    return norm


def _zero(column: npt.NDArray[np.generic]) -> Floats:
    return np.nan_to_num(column.astype(np.float64), nan=0.0)


def _gap(values: Pair[Floats]) -> Floats:
    gap: Floats = np.abs(values.left - values.right)
    return gap


def _extreme_gap(pairs: Pairs, name: str) -> Floats:
    """Difference of two extremes; 0 where both are missing because neither tensor holds a finite number.

    An expert without tokens has none either; that it has tokens in one run only shows in the number of elements.
    """
    values = pairs.both(name).map(lambda column: column.astype(np.float64))
    no_tokens = (pairs["tokens"] == "experts") & (np.minimum(*pairs.both("numel").map(_zero)) == 0)
    missing: Flags = no_tokens | (np.isnan(values.left) & np.isnan(values.right))
    return np.where(missing, 0.0, _gap(values))
