"""TensorBoard event files without TensorBoard: scalars as length-prefixed records with checksums.

A record is the length (8 bytes, little endian), its masked CRC-32C, the message, and the message's masked CRC-32C. The
message is the protocol buffer `Event`: wall time (1), step (2), then either the file version (3) or a summary (5) whose
values (1) hold a tag (1) and a float (2).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

_VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VALUES = 500
"""Values of one step in one event: large enough to be quick, small enough for every reader."""


def _make_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _make_table()


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum.

    Example::

        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    value, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        value = value >> 8 ^ table[(value ^ byte) & 255]
    return value ^ 0xFFFFFFFF


def record(message: bytes) -> bytes:
    """A message as it stands in an event file.

    Example::

        >>> len(record(b"abc"))
        19
    """
    length = struct.pack("<Q", len(message))
    return length + _masked(length) + message + _masked(message)


def event_chunks(scalars: Iterable[tuple[int, str, float]], wall_time: float) -> Iterator[bytes]:
    """The content of an event file, in pieces; `scalars` are (step, tag, value), steps together."""
    yield record(_double(1, wall_time) + _bytes(3, _VERSION))
    values: list[bytes] = []
    now = 0
    for step, tag, value in scalars:
        if values and (step != now or len(values) >= _VALUES):
            yield _event(wall_time, now, values)
            values = []
        now = step
        text = tag.encode("utf-8", "replace")
        values.append(_bytes(1, _bytes(1, text) + _key(2, _FIXED32) + struct.pack("<f", _single(value))))
    if values:
        yield _event(wall_time, now, values)


def header(wall_time: float) -> bytes:
    """The first record of an event file."""
    return record(_double(1, wall_time) + _bytes(3, _VERSION))


def scalars_record(wall_time: float, step: int, scalars: Iterable[tuple[str, float]]) -> bytes:
    """One record with scalars of one step, for a file that grows while a job runs."""
    values = []
    for tag, value in scalars:
        text = tag.encode("utf-8", "replace")
        values.append(_bytes(1, _bytes(1, text) + _key(2, _FIXED32) + struct.pack("<f", _single(value))))
    return record(_double(1, wall_time) + _key(2, _VARINT) + _number(step) + _bytes(5, b"".join(values)))


def image_record(wall_time: float, step: int, tag: str, png: bytes, size: tuple[int, int]) -> bytes:
    """One record with a picture; `size` is height and width."""
    picture = _key(1, _VARINT) + _number(size[0]) + _key(2, _VARINT) + _number(size[1])
    picture += _key(3, _VARINT) + _number(3) + _bytes(4, png)
    value = _bytes(1, _bytes(1, tag.encode("utf-8", "replace")) + _bytes(4, picture))
    return record(_double(1, wall_time) + _key(2, _VARINT) + _number(step) + _bytes(5, value))


def _event(wall_time: float, step: int, values: list[bytes]) -> bytes:
    # Seconds after the start stand for steps, so that "relative" and "wall" axes are ordered too.
    message = _double(1, wall_time + step) + _key(2, _VARINT) + _number(step) + _bytes(5, b"".join(values))
    return record(message)


def _single(value: float) -> float:
    """Nearest value that a float can hold; beyond its range, infinity."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", ((value >> 15 | value << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _key(field: int, kind: int) -> bytes:
    return _number(field << 3 | kind)


def _bytes(field: int, data: bytes) -> bytes:
    return _key(field, _BYTES) + _number(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return _key(field, _FIXED64) + struct.pack("<d", value)
