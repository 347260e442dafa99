"""Digest and sketch by plain torch operations: the twin of the compiled kernel, for every device.

Both are sums over the elements keyed by their number in the whole tensor, so that shards add up. The arithmetic is
that of 64-bit integers, which wraps around in torch as it does in C: digests are the same to the bit.
"""

from __future__ import annotations

import torch

from msprobe_megatron.measure.plans import Numbering, local_numbering

PIECE = 1 << 20
"""Elements in work at once: about 8 MiB for each temporary of 64-bit integers."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_INDEX_FACTOR = _signed(0x9E3779B97F4A7C15)
_KEY_FACTOR = _signed(0xD6E8FEB86659FD93)
_BITS_FACTOR = _signed(0xA0761D6478BD642F)


def numbered_into(x: torch.Tensor, numbering: Numbering | None, digest: torch.Tensor, cells: torch.Tensor) -> None:
    """Add nothing, replace: write the digest of ``x`` into ``digest`` (one int64) and its sketch into ``cells``.

    ``x`` is detached and strided; ``cells`` may be empty. ``numbering`` None numbers ``x`` row by row. Never waits for
    a device.

    Example::

        digest = torch.zeros(1, dtype=torch.int64)
        numbered_into(torch.ones(4), None, digest, torch.zeros(0))
    """
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
        pair = (1, ((0, 2, 0),))
        numbering = numbering and (*((2 * step, _doubled(cuts)) for step, cuts in numbering), pair)
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
        digest += (mixed * keys).sum()
        if cells.numel():
            _sketch(part, keys, cells)


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
