"""Numbers that follow from the place of an element in the whole tensor: the same on every rank, layout and machine.

Integer arithmetic only, up to one exact conversion: no generator is used, and no library function that another machine
might round otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from msprobe_megatron.run_directory.digest import Numbering

PIECE = 1 << 20
"""Elements in work at once."""

_WORD = (1 << 64) - 1
_SPREAD = 1.7320508075688772 / 65536  # four uniform numbers add up to a variance of a third


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_STEP, _FIRST, _SECOND = (_signed(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def words(index: torch.Tensor, key: int) -> torch.Tensor:
    """One 64-bit word an element, from its number and a key."""
    z = (index + 1) * _STEP + _signed(key & _WORD)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FIRST
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _SECOND
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def bell(word: torch.Tensor) -> torch.Tensor:
    """Numbers of mean 0 and variance 1, nearly normal, in float32: four uniform numbers of 16 bits each, added up.

    Example::

        >>> bell(words(torch.arange(1000), key=7)).std()
        tensor(0.9571)
    """
    total = torch.full_like(word, -2 * 0xFFFF)
    for shift in (0, 16, 32, 48):
        total += (word >> shift) & 0xFFFF
    return total.to(torch.float32) * _SPREAD


def numbered_pieces(x: torch.Tensor, numbering: Numbering) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of ``x`` with the numbers that their elements have in the whole tensor."""
    if x.dim() == 0:
        yield x, torch.zeros((), dtype=torch.int64)
        return
    offsets = [
        torch.cat([torch.arange(count) * step + offset for _, count, offset in cuts]) for step, cuts in numbering
    ]
    rows = max(1, PIECE // max(1, x[0].numel()))
    for first in range(0, x.shape[0], rows):
        part = x[first : first + rows]
        index = offsets[0][first : first + rows]
        for more in offsets[1:]:
            index = index.unsqueeze(-1) + more
        yield part, index
