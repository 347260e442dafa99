"""How the kernel walks through a strided tensor, and which number each element has in the whole one.

A plan is made once for a dtype, shape, strides and numbering, and used for every tensor of that kind. It is a row of
64-bit words, laid out as `kernel/api.cpp` reads them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from msprobe_megatron.run_directory.digest import Numbering, Segments, local_numbering

STATISTICS_ONLY = -1


class Plan(NamedTuple):
    """The address of the words; ``held`` keeps them, and what they point to, where they are."""

    address: int
    held: tuple[object, ...]


class Dim(NamedTuple):
    """One dimension of a tensor: its place in memory, and its share in the numbers of the elements."""

    size: int
    stride: int
    step: int
    segments: Segments


def joined_dims(shape: Sequence[int], strides: Sequence[int], numbering: Numbering | None) -> list[Dim]:
    """The dimensions of a tensor, as few as will do; ``numbering`` None numbers it row by row.

    Example::

        >>> joined_dims((2, 3, 4), (12, 4, 1), None)
        [Dim(size=24, stride=1, step=1, segments=((0, 24, 0),))]
    """
    numbers = local_numbering(shape) if numbering is None else numbering
    dims = [Dim(n, s, step, cuts) for n, s, (step, cuts) in zip(shape, strides, numbers, strict=True)]
    # A dimension of one element that adds nothing to the number needs no loop.
    return _joined([dim for dim in dims if dim.size != 1 or dim.segments[0][2]])


def in_memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Shape and strides with the dimensions sorted by stride, for statistics: those do not depend on the order."""
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    return [shape[dim] for dim in order], [strides[dim] for dim in order]


def make_plan(
    code: int, values: int, shape: Sequence[int], strides: Sequence[int], numbering: Numbering | None, cells: int
) -> Plan:
    """Words for `msprobe_measure`; ``cells`` is the size of the sketch, or STATISTICS_ONLY."""
    dims = joined_dims(shape, strides, numbering)
    if not dims or dims[-1].step != 1:
        dims.append(Dim(1, 1, 1, ((0, 1, 0),)))
    *outer, inner = dims
    segments = array("q", [number for cut in inner.segments for number in cut])
    tables = [array("q", numbers_of(dim)) for dim in outer]
    words = array("q", [code, values, len(outer), inner.size, inner.stride, len(inner.segments), _at(segments), cells])
    for dim, table in zip(outer, tables, strict=True):
        words.extend((dim.size, dim.stride, _at(table)))
    return Plan(_at(words), (words, segments, tables))


def _at(words: array[int]) -> int:
    return words.buffer_info()[0]


def numbers_of(dim: Dim) -> list[int]:
    """What each position of a dimension adds to the number of an element."""
    return [offset + k * dim.step for _, count, offset in dim.segments for k in range(count)]


def _joined(dims: list[Dim]) -> list[Dim]:
    """Neighbours that lie in one piece, in memory and in their numbers, become one dimension."""
    found: list[Dim] = []
    for dim in dims:
        if found and found[-1].stride == dim.size * dim.stride and _follows(found[-1], dim):
            above = found.pop()
            cuts = tuple((first * dim.size, count * dim.size, offset) for first, count, offset in above.segments)
            found.append(Dim(above.size * dim.size, dim.stride, dim.step, cuts))
        else:
            found.append(dim)
    return found


def _follows(above: Dim, dim: Dim) -> bool:
    return above.step == dim.size * dim.step and dim.segments == ((0, dim.size, 0),)
