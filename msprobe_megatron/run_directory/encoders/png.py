"""Pictures without a library: a heat map of numbers as a PNG file."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
# Dark blue, green, yellow: readable in grey and by colour-blind people.
_COLOURS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], np.float64)
_NOTHING, _NOT_FINITE = (235, 235, 235), (220, 30, 30)


def heat_map(values: npt.NDArray[np.float64], cell: tuple[int, int] = (12, 6)) -> Pixels:
    """Pixels of a table of numbers: its smallest dark, its largest bright, NaN grey, infinities red."""
    finite = np.isfinite(values)
    low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 1.0)
    share = np.where(finite, (values - low) / (high - low if high > low else 1.0), 0.0) * (len(_COLOURS) - 1)
    below = np.clip(share.astype(int), 0, len(_COLOURS) - 2)
    part = (share - below)[..., None]
    colours = (1 - part) * _COLOURS[below] + part * _COLOURS[below + 1]
    colours[np.isnan(values)], colours[np.isinf(values)] = _NOTHING, _NOT_FINITE
    return np.asarray(np.kron(np.round(colours), np.ones((*cell, 1))), np.uint8)


def png(pixels: Pixels) -> bytes:
    """The PNG file of (height, width, 3) pixels.

    Example::

        >>> png(np.zeros((2, 2, 3), np.uint8))[1:4]
        b'PNG'
    """
    height, width, _ = pixels.shape
    lines = np.concatenate((np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)), axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
