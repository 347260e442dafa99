"""The global index of each element of a shard.

Digests and sketches are keyed by it, so that the shards of a tensor add up to the same value however it is sharded.
Pure functions: from a shard spec and the coordinates of a rank to a few segments per dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from msprobe_megatron.topology.shards import Cut, ShardSpec

Interval = tuple[int, int]
Numbering = tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]
"""For each dimension its stride and segments (first, count, offset); see `measure.plans`."""

_MOST_RUNS = 1 << 16


def index_map(
    spec: ShardSpec, shape: Sequence[int], rank: Callable[[str], int], size: Callable[[str], int]
) -> Numbering | None:
    """Global indices of the elements of a shard of local ``shape``, or None where they have no fixed position.

    For a spec with a flat range, ``shape`` is that of the whole local tensor which the range is taken from.

    Example::

        >>> index_map(ShardSpec.parse("s[cp:zigzag]"), (4,), lambda a: 0, lambda a: 2)
        ((1, ((0, 2, 0), (2, 2, 6))),)
    """
    whole = spec.global_shape(shape, size)
    if whole is None or spec.partial or 0 in whole:
        return None
    steps = [math.prod(whole[index + 1 :]) for index in range(len(whole))]
    intervals = [_held(extent, dim.cuts, rank, size) for extent, dim in zip(whole, spec.dims, strict=True)]
    if spec.flat is None:
        return tuple((step, _segments(held, step)) for step, held in zip(steps, intervals, strict=True))
    runs = _flat_runs(intervals, steps, spec.flat)
    return None if runs is None else ((1, runs),)


def _held(extent: int, cuts: Sequence[Cut], rank: Callable[[str], int], size: Callable[[str], int]) -> list[Interval]:
    """Intervals of a global dimension that a rank holds, in local order."""
    held = [(0, extent)]
    for cut in cuts:
        count = size(cut.axis)
        if cut.order == "samples" or count <= 1:
            continue
        length, place = sum(stop - start for start, stop in held), rank(cut.axis)
        pieces = pairwise(accumulate(cut.pieces(length), initial=0))
        if cut.order == "zigzag":
            parts, shares = 2 * count, [place, 2 * count - 1 - place]
        else:
            parts, shares = cut.parts(count), [cut.part(place, count)]
        wanted = [_share(low, high, share, parts) for low, high in pieces for share in shares]
        held = [piece for low, high in wanted for piece in _slice(held, low, high)]
    return held


def _share(low: int, high: int, place: int, count: int) -> Interval:
    part = (high - low) // count
    return low + place * part, low + (place + 1) * part


def _slice(intervals: list[Interval], low: int, high: int) -> list[Interval]:
    """Elements ``low`` to ``high`` of the intervals laid end to end."""
    found, at = [], 0
    for start, stop in intervals:
        first, last = max(low - at, 0), min(high - at, stop - start)
        if first < last:
            found.append((start + first, start + last))
        at += stop - start
    return found


def _segments(held: list[Interval], step: int) -> tuple[tuple[int, int, int], ...]:
    found, at = [], 0
    for start, stop in held:
        found.append((at, stop - start, start * step))
        at += stop - start
    return tuple(found)


def _flat_runs(
    intervals: list[list[Interval]], steps: list[int], flat: Interval
) -> tuple[tuple[int, int, int], ...] | None:
    """Runs of consecutive indices in elements ``flat`` of the row-major local tensor; None if there are too many."""
    sizes = [sum(stop - start for start, stop in held) for held in intervals]
    # Trailing dimensions that are not sharded are contiguous with the one before them.
    last = len(intervals) - 1
    while last > 0 and intervals[last] == [(0, steps[last - 1] // steps[last])]:
        last -= 1
    if last < 0:
        return ((0, 1, 0),) if flat[1] > flat[0] else ()
    inner, rows = _segments(intervals[last], steps[last]), math.prod(sizes[:last])
    scale, row_length = steps[last], sizes[last] * steps[last]
    first_row, last_row = flat[0] // max(row_length, 1), -(-flat[1] // max(row_length, 1))
    if (last_row - first_row) * len(inner) > _MOST_RUNS:
        return None
    found: list[tuple[int, int, int]] = []
    for row in range(first_row, min(last_row, rows)):
        base, rest = 0, row
        for index in range(last - 1, -1, -1):
            rest, place = divmod(rest, sizes[index])
            base += _at(intervals[index], place) * steps[index]
        for first, count, offset in inner:
            low = max(row * row_length + first * scale, flat[0])
            high = min(row * row_length + (first + count) * scale, flat[1])
            if low < high:
                inside = low - row * row_length - first * scale
                found.append((low - flat[0], high - low, base + offset + inside))
    return tuple(found)


def _at(held: list[Interval], place: int) -> int:
    for start, stop in held:
        if place < stop - start:
            return start + place
        place -= stop - start
    raise IndexError(place)
