"""Judging: the relative error of every matched tensor, and whether rounding explains it.

Pure functions on the columns of `match`. An error is measured in units that cannot vanish by cancellation (see
`tolerance`), so that a mean near zero is never the reason of a verdict. Numbers of NaN and infinities must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analyse.match import Pairs
from msprobe_megatron.analyse.tolerance import EPS32, Floats

Flags = npt.NDArray[np.bool_]

_TINY = 1e-300
_BAD = ("n_nan", "n_posinf", "n_neginf")


@dataclass
class Judgement:
    """One entry a pair of tensors; `layout` holds the reason where they cannot be compared, else an empty text.

    `replica` marks what differs between the ranks of one run that should hold the same numbers.
    """

    error: Floats
    tolerance: Floats
    diverged: Flags
    replica: Flags
    layout: npt.NDArray[np.object_]


def judge(pairs: Pairs, tolerance: Floats, padded_vocabulary: tuple[int, int] | None = None) -> Judgement:
    """Errors and verdicts of all pairs.

    Example::

        judge(pairs, tolerances(pairs, scene)).diverged.sum()
    """
    both = pairs["left_has"].astype(bool) & pairs["right_has"].astype(bool)
    layout = _reasons(pairs, both, padded_vocabulary)
    scale = scales(pairs)
    error = errors(pairs, scale)
    between, bad_replicas = _replica_errors(pairs, scale, tolerance)
    comparable = both & (layout == "")
    same_bits = np.array([a is not None and a == b for a, b in zip(pairs["digest_l"], pairs["digest_r"], strict=True)])
    exact = (pairs["kind"] == "parameter") & (tolerance <= 4 * EPS32) | (tolerance < EPS32)
    other_bits = exact & np.array(
        [a is not None and b is not None and a != b for a, b in zip(pairs["digest_l"], pairs["digest_r"], strict=True)]
    )
    # One flipped bit of a large weight is below what its statistics can show, and above what its digest allows.
    error = np.where(other_bits & (error <= tolerance), 2 * tolerance, error)
    diverged = comparable & (error > tolerance) & ~same_bits
    replica = both & bad_replicas & (pairs["reason_r"] == "")
    return Judgement(
        error=np.where(replica & ~diverged, between, error),
        tolerance=tolerance,
        diverged=diverged | (replica & comparable),
        replica=replica,
        layout=layout,
    )


def errors(pairs: Pairs, scale: Floats) -> Floats:
    """Relative error of norm, sum and half of the extremes: the largest; infinite where non-finite counts differ."""
    numel = np.maximum(pairs["numel_l"], pairs["numel_r"]).astype(np.float64)
    norm_l, norm_r = _norm(pairs["sumsq_l"]), _norm(pairs["sumsq_r"])
    largest = np.maximum(_zero(pairs["absmax_l"]), _zero(pairs["absmax_r"]))
    # Where the norm was replaced by a larger scale, the extremes follow it.
    own = np.maximum(norm_l, norm_r)
    largest = largest * np.where(own > 0, scale / np.maximum(own, _TINY), 1.0)
    parts = [
        np.abs(norm_l - norm_r) / np.maximum(scale, _TINY),
        np.abs(_zero(pairs["sum_l"]) - _zero(pairs["sum_r"])) / np.maximum(np.sqrt(numel) * scale, _TINY),
        _apart(pairs, "min") / np.maximum(2 * largest, _TINY),
        _apart(pairs, "max") / np.maximum(2 * largest, _TINY),
        np.abs(pairs["numel_l"] - pairs["numel_r"]) / np.maximum(numel, 1),
    ]
    error: Floats = np.maximum.reduce(parts)
    for name in _BAD:
        error = np.where(_zero(pairs[f"{name}_l"]) != _zero(pairs[f"{name}_r"]), np.inf, error)
    return np.where(np.isnan(error), np.inf, error)


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


def _replica_errors(pairs: Pairs, scale: Floats, tolerance: Floats) -> tuple[Floats, Flags]:
    """Errors between the ranks of the second run that hold the same part, and where they are too large."""
    numel = np.maximum(_zero(pairs["numel_r"]).astype(np.float64), 1)
    largest = np.maximum(_zero(pairs["absmax_r"]), _TINY)
    between: Floats = np.maximum.reduce(
        [
            _zero(pairs["d_norm_r"]) / np.maximum(scale, _TINY),
            _zero(pairs["d_sum_r"]) / np.maximum(np.sqrt(numel) * scale, _TINY),
            _zero(pairs["d_extreme_r"]) / (2 * largest),
        ]
    )
    between = np.where(_zero(pairs["d_counts_r"]) > 0, np.inf, between)
    return between, between > tolerance


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
