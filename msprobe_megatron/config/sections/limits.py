"""The ``limits`` section: host memory and disk space that the kit may use.

Sizes are written ``2GiB``, ``500MB`` or ``1024``. Decimal and binary units are distinguished, because a disk quota and
a memory limit are stated in different ones and a tenth is lost at a terabyte.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from msprobe_megatron.config.document import Node
from msprobe_megatron.config.keys import ValueType, any_schema, key, section

UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
ACCEPTED = "a size above 0 such as 2GiB, 500MB or 1024 (bytes)"
_LARGEST = 2**63 - 1
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]{1,3})?")


def parse_size(node: Node) -> int:
    """Read a size into bytes."""
    value = node.value
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        size = _from_text(value, node)
    else:
        raise node.error("is not a size", ACCEPTED)
    if not 0 < size <= _LARGEST:
        raise node.error("is out of range", ACCEPTED)
    return size


def _from_text(text: str, node: Node) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise node.error("is not a size", ACCEPTED)
    number, unit = match.groups(default="B")
    if unit not in UNITS:
        raise node.error(f"has no known unit ({unit})", f"{ACCEPTED}; units: {', '.join(UNITS)}")
    # A fraction, not a float: 0.1TB must be exactly 10**11 bytes.
    return int(Fraction(number) * UNITS[unit])


def format_size(size: int) -> str:
    """Bytes in the largest binary unit that keeps the number exact, else with one decimal."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = UNITS[unit]
        if size >= scale:
            return f"{size // scale}{unit}" if size % scale == 0 else f"{size / scale:.1f}{unit}"
    return f"{size}B"


SIZE = ValueType(parse_size, any_schema([{"type": "integer", "minimum": 1}, {"type": "string"}]), format_size)


@dataclass(frozen=True)
class Limits:
    """The ``limits`` section. Without a ``disk`` limit the file system is the limit."""

    host_memory: int = key(2 << 30, SIZE, "host memory per rank for statistics and queues, at most", "4GiB")
    disk: int | None = key(
        None,
        SIZE,
        "size of what is recorded, at most, beside run.json, ranks/ and events.jsonl; every rank has an equal share",
        "100GiB",
    )

    def describe(self) -> str:
        """One line for `msprobe-megatron validate`."""
        disk = f", disk {format_size(self.disk)}" if self.disk is not None else ""
        return f"host memory {format_size(self.host_memory)}{disk}"


LIMITS = section(Limits)
