"""md5 and crc32 of a tensor's own bytes, row by row, for those who compare with msprobe's.

They hash what lies in this rank's memory, so they do not add up over shards; and they need the bytes on the host, so
on an accelerator every tensor waits for a copy. The digest of ``numbered`` does neither.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable

import torch

from msprobe_megatron.measure.stats import readable


def _bytes(x: torch.Tensor) -> memoryview:
    found = readable(x)
    if found is None or found.numel() == 0:
        return memoryview(b"")
    data = found.data.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return data.view(torch.uint8).cpu().numpy().data


def md5(x: torch.Tensor) -> str:
    """Return md5 of the bytes in row-major order.

    Example::

        md5(torch.zeros(2))   # that of eight zero bytes
    """
    return hashlib.md5(_bytes(x), usedforsecurity=False).hexdigest()


def crc32(x: torch.Tensor) -> str:
    """Return CRC-32 of the bytes in row-major order, eight hexadecimal digits.

    Example::

        crc32(torch.zeros(2))   # '6522df69'
    """
    return f"{zlib.crc32(_bytes(x)):08x}"


HASHES: dict[str, Callable[[torch.Tensor], str]] = {"md5": md5, "crc32": crc32}
