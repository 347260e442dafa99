"""Which instructions this machine has, and the compiler flags for them.

Asked on every machine at run time: a cache in a shared home directory may hold kernels that the next machine
could not run.
"""

from __future__ import annotations

import platform
from typing import NamedTuple


class Level(NamedTuple):
    """A set of instructions: its name, the flags that Linux shows for it, the flags of the compiler."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_X86 = (
    Level(
        "avx512",
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"}),
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
    ),
    Level("avx2", frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
)
PLAIN = Level("plain", frozenset(), ())
"""What every machine of its kind has."""


def levels(machine: str | None = None, cpu_flags: frozenset[str] | None = None) -> list[Level]:
    """Levels that this machine can run, best first; the last is what every machine of its kind has.

    Example::

        >>> [level.name for level in levels("x86_64", frozenset({"avx2", "fma"}))]
        ['avx2', 'plain']
    """
    machine = platform.machine() if machine is None else machine
    if machine.lower() not in ("x86_64", "amd64"):
        return [PLAIN]
    has = _linux_flags() if cpu_flags is None else cpu_flags
    return [*(level for level in _X86 if level.needs <= has), PLAIN]


def _linux_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()
