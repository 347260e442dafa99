"""How the kernel walks through a strided tensor, and which number each element has in the whole one.

A plan is made once for a dtype, shape, strides and numbering, and used for every tensor of that kind. It is a row of
64-bit words, laid out as `kernel.cpp` reads them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

Segments = tuple[tuple[int, int, int], ...]
Numbering = tuple[tuple[int, Segments], ...]
"""For each dimension its step, and segments (first, count, offset): the element at position i of a segment adds
``offset + (i - first) * step`` to its number in the whole tensor. The sum over the dimensions is the number."""

STATISTICS_ONLY = -1


class Plan(NamedTuple):
    """The address of the words; ``held`` keeps them, and what they point to, where they are."""

    address: int
    held: tuple[object, ...]


class _Dim(NamedTuple):
    size: int
    stride: int
    step: int
    segments: Segments


def local_numbering(shape: Sequence[int]) -> Numbering:
    """Row-major numbers of a tensor that is whole.

    Example::

        >>> local_numbering((2, 3))
        ((3, ((0, 2, 0),)), (1, ((0, 3, 0),)))
    """
    found, step = [], 1
    for size in reversed(shape):
        found.append((step, ((0, size, 0),)))
        step *= size
    return tuple(reversed(found))


def make_plan(
    code: int, values: int, shape: Sequence[int], strides: Sequence[int], numbering: Numbering | None, cells: int
) -> Plan:
    """Words for `msprobe_measure`; ``cells`` is the size of the sketch, or STATISTICS_ONLY.

    Example::

        plan = make_plan(FLOAT32, 0, (2, 3), (3, 1), None, cells=0)
    """
    numbers = local_numbering(shape) if numbering is None else numbering
    dims = [_Dim(n, s, step, cuts) for n, s, (step, cuts) in zip(shape, strides, numbers, strict=True)]
    # A dimension of one element that adds nothing to the number needs no loop.
    dims = _joined([dim for dim in dims if dim.size != 1 or dim.segments[0][2]])
    if not dims or dims[-1].step != 1:
        dims.append(_Dim(1, 1, 1, ((0, 1, 0),)))
    *outer, inner = dims
    segments = array("q", [number for cut in inner.segments for number in cut])
    tables = [array("q", _offsets(dim)) for dim in outer]
    words = array("q", [code, values, len(outer), inner.size, inner.stride, len(inner.segments), _at(segments), cells])
    for dim, table in zip(outer, tables, strict=True):
        words.extend((dim.size, dim.stride, _at(table)))
    return Plan(_at(words), (words, segments, tables))


def _at(words: array[int]) -> int:
    return words.buffer_info()[0]


def _offsets(dim: _Dim) -> list[int]:
    return [offset + k * dim.step for _, count, offset in dim.segments for k in range(count)]


def _joined(dims: list[_Dim]) -> list[_Dim]:
    """Neighbours that lie in one piece, in memory and in their numbers, become one dimension."""
    found: list[_Dim] = []
    for dim in dims:
        if found and found[-1].stride == dim.size * dim.stride and _follows(found[-1], dim):
            above = found.pop()
            cuts = tuple((first * dim.size, count * dim.size, offset) for first, count, offset in above.segments)
            found.append(_Dim(above.size * dim.size, dim.stride, dim.step, cuts))
        else:
            found.append(dim)
    return found


def _follows(above: _Dim, dim: _Dim) -> bool:
    return above.step == dim.size * dim.step and dim.segments == ((0, dim.size, 0),)
