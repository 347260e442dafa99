"""Assembly: which elements of one run's shards correspond to which of the other's, without merging either.

A shard occupies one or a few boxes of the whole tensor: its segments along each dimension (`topology.index_map`). Two
runs split the same tensor differently; the intersections of their boxes are boxes too, and each is a view of a shard on
either side. Only flat ranges (optimizer shards) beside shards of another form need a copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msprobe_megatron.analysis.compare.pairs.elements import Index, View
from msprobe_megatron.topology.index_map import index_map
from msprobe_megatron.topology.shards import ShardSpec

Segment = tuple[int, int, int]
"""First element in the shard, number of elements, first element in the whole."""


@dataclass(frozen=True)
class Part:
    """One shard: its elements, the names of its dimensions, and where each of them lies in the whole.

    `flat` shards have one dimension, whose segments count elements of the whole in row-major order.
    """

    view: View
    dims: tuple[str, ...]
    segments: tuple[tuple[Segment, ...], ...]
    whole: Index
    flat: bool = False

    @property
    def complete(self) -> bool:
        """True if this part is the whole tensor in its own order."""
        return self.view.words.shape == self.whole and all(
            len(held) == 1 and held[0][0] == held[0][2] == 0 for held in self.segments
        )


def part_of(
    view: View, spec: ShardSpec, whole: Index, place: dict[str, int], sizes: dict[str, int], batch: Segment | None
) -> Part | None:
    """A shard from its spec and the coordinates of its rank; None if it has no fixed place.

    `batch` is (0, samples of this microbatch, its first sample among those compared): shards of several microbatches
    make up one whole along the dimension `b`.
    """

    def size(axis: str) -> int:
        return sizes.get(axis, 1)

    local = tuple(
        extent // math.prod(cut.parts(size(cut.axis)) for cut in dim.cuts)
        for extent, dim in zip(whole, spec.dims, strict=True)
    )
    numbering = index_map(spec, local, lambda axis: place.get(axis, 0), size)
    if numbering is None:
        return None
    names = tuple(dim.name for dim in spec.dims)
    if spec.flat is not None:
        return None if batch else Part(view, names, (numbering[0][1],), whole, flat=True)
    segments = [tuple((first, count, offset // step) for first, count, offset in held) for step, held in numbering]
    if batch is not None:
        if "b" not in names:
            return None
        at = names.index("b")
        segments[at] = tuple((first, count, start + batch[2]) for first, count, start in segments[at])
        whole = (*whole[:at], batch[1], *whole[at + 1 :])
    return Part(view, names, tuple(segments), whole)


def meet(left: Sequence[Part], right: Sequence[Part]) -> Iterator[tuple[View, View, Index]] | None:
    """Pairs of views that hold the same elements of the whole, and the number of their first element in it.

    None if the two do not cover the same whole.
    """
    right = [_in_order(part, left[0].dims) for part in right]
    shapes = {part.whole for part in (*left, *right)}
    if len(shapes) != 1:
        return None
    whole = shapes.pop()
    if any(part.flat for part in (*left, *right)):
        sides = [_flat(parts, whole) for parts in (left, right)]
        return None if sides[0] is None or sides[1] is None else _meet_flat(sides[0], sides[1])
    if not covers(left, whole) or not covers(right, whole):
        return None
    return _meet_boxes(left, right)


def _in_order(part: Part, dims: tuple[str, ...]) -> Part:
    """The same shard with its dimensions in the order of the other run: [b, s, h] as [s, b, h]."""
    if part.dims == dims or part.flat or sorted(part.dims) != sorted(dims) or len(set(dims)) != len(dims):
        return part
    order = [part.dims.index(name) for name in dims]
    words = part.view.words.transpose(order)
    return Part(
        View(part.view.dtype, words),
        dims,
        tuple(part.segments[i] for i in order),
        tuple(part.whole[i] for i in order),
    )


def covers(parts: Sequence[Part], whole: Index) -> bool:
    """True if the shards have as many elements as the whole."""
    return sum(math.prod(sum(count for _, count, _ in held) for held in part.segments) for part in parts) == math.prod(
        whole
    )


def _meet_boxes(left: Sequence[Part], right: Sequence[Part]) -> Iterator[tuple[View, View, Index]]:
    for a, b in itertools.product(left, right):
        along = [_common(x, y) for x, y in zip(a.segments, b.segments, strict=True)]
        for box in itertools.product(*along):
            x = tuple(slice(first, first + count) for first, _, _, count in box)
            y = tuple(slice(first, first + count) for _, first, _, count in box)
            yield a.view[x], b.view[y], tuple(start for _, _, start, _ in box)


def _common(left: Sequence[Segment], right: Sequence[Segment]) -> list[tuple[int, int, int, int]]:
    """Where segments of two shards overlap: first element in either, in the whole, and how many."""
    found = []
    for (x, x_count, x_at), (y, y_count, y_at) in itertools.product(left, right):
        first, last = max(x_at, y_at), min(x_at + x_count, y_at + y_count)
        if first < last:
            found.append((x + first - x_at, y + first - y_at, first, last - first))
    return found


def _flat(parts: Sequence[Part], whole: Index) -> list[tuple[View, int]] | None:
    """A side as one-dimensional views with their first element of the whole; merged by a copy where necessary."""
    if len(parts) == 1 and not parts[0].flat and parts[0].complete:
        return [(View(parts[0].view.dtype, parts[0].view.words.reshape(-1)), 0)]
    if not all(part.flat for part in parts):
        if any(part.flat for part in parts) or not covers(parts, whole):
            return None
        return [(View(parts[0].view.dtype, together(parts, whole)), 0)]
    runs = [
        (View(part.view.dtype, part.view.words.reshape(-1)[first : first + count]), start)
        for part in parts
        for first, count, start in part.segments[0]
    ]
    runs.sort(key=lambda run: run[1])
    at = 0
    for view, start in runs:
        if start != at:
            return None
        at += view.words.size
    return runs if at == math.prod(whole) else None


def together(parts: Sequence[Part], whole: Index) -> Any:
    """The whole tensor, copied together from shards that are not flat; its words in one dimension."""
    buffer = np.empty(whole, parts[0].view.words.dtype)
    for part in parts:
        for box in itertools.product(*part.segments):
            local = tuple(slice(first, first + count) for first, count, _ in box)
            buffer[tuple(slice(start, start + count) for _, count, start in box)] = part.view.words[local]
    return buffer.reshape(-1)


def _meet_flat(
    left: Sequence[tuple[View, int]], right: Sequence[tuple[View, int]]
) -> Iterator[tuple[View, View, Index]]:
    i = j = 0
    while i < len(left) and j < len(right):
        (x, x_at), (y, y_at) = left[i], right[j]
        first, last = max(x_at, y_at), min(x_at + x.words.size, y_at + y.words.size)
        if first < last:
            yield x[(slice(first - x_at, last - x_at),)], y[(slice(first - y_at, last - y_at),)], (first,)
        if x_at + x.words.size <= y_at + y.words.size:
            i += 1
        else:
            j += 1
