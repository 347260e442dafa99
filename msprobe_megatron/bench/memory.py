"""Peak memory of this process between two moments, from the kernel's own high-water mark."""

from __future__ import annotations

import ctypes
from pathlib import Path

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"  # see proc(5): resets VmHWM to the current size


class PeakMemory:
    """Says how much resident memory a piece of work needed at most; 0 where the kernel does not tell.

    Example::

        memory = PeakMemory()
        memory.reset()
        work()
        memory.peak()
    """

    def trim(self) -> None:
        """Give back what the allocator only holds in reserve: else the peak of one variant is that of all after it."""
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (AttributeError, OSError):  # another C library
            return

    def reset(self) -> None:
        """Begin anew."""
        try:
            _RESET.write_text(_RESET_PEAK, encoding="ascii")
        except OSError:
            return

    def peak(self) -> int:
        """Bytes resident at most since `reset`."""
        try:
            for line in _STATUS.read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except (OSError, ValueError):
            return 0
        return 0
