"""Digest and sketch of a tensor by plain torch operations, as run directories hold them: the definition of both.

Both are sums over the elements keyed by their number in the whole tensor, so that shards add up. The arithmetic is
that of 64-bit integers, which wraps around in torch as it does in C: the compiled kernel gives the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

Segments = tuple[tuple[int, int, int], ...]
Numbering = tuple[tuple[int, Segments], ...]
"""For each dimension its step, and segments (first, count, offset): the element at position i of a segment adds
``offset + (i - first) * step`` to its number in the whole tensor. The sum over the dimensions is the number."""

PIECE = 1 << 20
"""Elements in work at once: about 8 MiB for each temporary of 64-bit integers."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_INDEX_FACTOR = _signed(0x9E3779B97F4A7C15)
_KEY_FACTOR = _signed(0xD6E8FEB86659FD93)
_BITS_FACTOR = _signed(0xA0761D6478BD642F)


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


def numbered_into(x: torch.Tensor, numbering: Numbering | None, digest: torch.Tensor, cells: torch.Tensor) -> None:
    """Add nothing, replace: write the digest of ``x`` into ``digest`` (one int64) and its sketch into ``cells``.

    ``x`` is detached and strided; ``cells`` may be empty. ``numbering`` None numbers ``x`` row by row. Never waits for
    a device.
    """
    if x.is_complex():
        x, numbering = torch.view_as_real(x.resolve_conj()), complex_numbering(numbering)
    x = x.resolve_neg()
    if x.dim() == 0:
        x, numbering = x.reshape(1), None
    numbers = _offsets(local_numbering(x.shape) if numbering is None else numbering, x.device)
    digest.zero_()
    cells.zero_()
    if x.numel() == 0:
        return
    for part, index in _pieces(x, numbers):
        keys = _keys(index)
        bits = part.contiguous().view(_BITS[part.element_size()]).to(torch.int64)
        if part.element_size() in (2, 4):
            bits &= (1 << (8 * part.element_size())) - 1
        mixed = (bits + 1) * _BITS_FACTOR
        mixed ^= _shifted(mixed, 32)
        digest += integer_sum((mixed * keys).reshape(-1), 0)
        if cells.numel():
            _sketch(part, keys, cells)


@lru_cache(maxsize=4096)
def complex_numbering(numbering: Numbering | None) -> Numbering | None:
    """The numbering of the real and imaginary parts of a tensor; None stays row by row."""
    return numbering and (*((2 * step, _doubled(cuts)) for step, cuts in numbering), (1, ((0, 2, 0),)))


def integer_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum of 64-bit integers along a dimension that is not empty, also on a device that lacks this reduction.

    There halves are added to each other, which gives the same: integers wrap around in any order.

    Example::

        >>> integer_sum(torch.arange(5), 0)
        tensor(10)
    """
    kind = x.device.type
    if kind not in _NO_INTEGER_SUM:
        try:
            return x.sum(dim)
        except RuntimeError:
            if x.is_cpu:
                raise
            _NO_INTEGER_SUM.add(kind)
    while (size := x.shape[dim]) > 1:
        half = size // 2
        left = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = left if size % 2 == 0 else torch.cat((left, x.narrow(dim, size - 1, 1)), dim)
    return x.squeeze(dim)


_NO_INTEGER_SUM: set[str] = set()


def _doubled(cuts: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple((first, count, 2 * offset) for first, count, offset in cuts)


def _offsets(numbering: Numbering, device: torch.device) -> list[torch.Tensor]:
    return [
        torch.cat([torch.arange(count, device=device) * step + offset for _, count, offset in cuts])
        for step, cuts in numbering
    ]


def _pieces(x: torch.Tensor, numbers: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if x.numel() > PIECE:
        dim = max(range(x.dim()), key=x.size)
        half = x.size(dim) // 2
        left, right = list(numbers), list(numbers)
        left[dim], right[dim] = numbers[dim][:half], numbers[dim][half:]
        return [*_pieces(x.narrow(dim, 0, half), left), *_pieces(x.narrow(dim, half, x.size(dim) - half), right)]
    index = numbers[0]
    for more in numbers[1:]:
        index = index.unsqueeze(-1) + more
    return [(x, index)]


def _shifted(word: torch.Tensor, by: int) -> torch.Tensor:
    # An arithmetic shift brings the sign down; a logical one, as C's for unsigned words, brings zeros.
    return (word >> by) & ((1 << (64 - by)) - 1)


def _keys(index: torch.Tensor) -> torch.Tensor:
    r = (index + 1) * _INDEX_FACTOR
    r ^= _shifted(r, 32)
    r *= _KEY_FACTOR
    r ^= _shifted(r, 29)
    return r | 1


def _sketch(part: torch.Tensor, keys: torch.Tensor, cells: torch.Tensor) -> None:
    wide = part.to(torch.float32).to(cells.dtype) if part.element_size() == 1 else part.to(cells.dtype)
    values = torch.where(torch.isfinite(wide), wide, 0)
    values = torch.where((keys & 2) == 0, -values, values)
    where = (_shifted(keys, 32) * cells.numel()) >> 32
    cells.index_add_(0, where.reshape(-1), values.reshape(-1))
