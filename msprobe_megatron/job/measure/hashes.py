"""md5 and crc32 of a tensor's own bytes, row by row, for those who compare with msprobe's.

They hash what lies in this rank's memory, so they do not add up over shards; and they need the bytes on the host, so
every tensor is copied there (`record.hash_packs`). The digest of ``numbered`` does neither.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable

import torch

from msprobe_megatron.job.measure.stats import readable


def raw_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of ``x`` in row-major order, where it lies: none of what cannot be read, a copy only if it has gaps.

    Example::

        >>> raw_bytes(torch.ones(1)).tolist()
        [0, 0, 128, 63]
    """
    found = readable(x)
    if found is None or found.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    return found.data.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _bytes(x: torch.Tensor) -> memoryview:
    return raw_bytes(x).cpu().numpy().data


def md5(x: torch.Tensor) -> str:
    """Return md5 of the bytes in row-major order.

    Example::

        >>> md5(torch.zeros(2))
        '7dea362b3fac8e00956a4952a3d4f474'
    """
    return hashlib.md5(_bytes(x), usedforsecurity=False).hexdigest()


def crc32(x: torch.Tensor) -> str:
    """Return CRC-32 of the bytes in row-major order, eight hexadecimal digits.

    Example::

        >>> crc32(torch.zeros(2))
        '6522df69'
    """
    return f"{zlib.crc32(_bytes(x)):08x}"


HASHES: dict[str, Callable[[torch.Tensor], str]] = {"md5": md5, "crc32": crc32}
