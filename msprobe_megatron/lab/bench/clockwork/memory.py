"""Peak memory of this process between two moments, from the kernel's own high-water mark."""

from __future__ import annotations

import ctypes
from pathlib import Path

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"  # see proc(5): resets VmHWM to the current size
# Of mallopt(3): from which size on a block has pages of its own, and how much may lie idle at the end of the heap.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_AT_ONCE = 64 << 10
_USUAL = 32 << 20
"""Where glibc itself ends up in a job with large tensors."""


class PeakMemory:
    """Says how much resident memory a piece of work needed at most; 0 where the kernel does not tell."""

    def trim(self) -> None:
        """Give back what the allocator only holds in reserve: else the peak of one variant is that of all after it."""
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (AttributeError, OSError):  # another C library
            return

    def exact(self, exact: bool) -> None:
        """Let the allocator give back at once what is freed, so that a peak is what is alive.

        That takes time: without it the allocator works as it does in any large job.
        """
        size = _AT_ONCE if exact else _USUAL
        try:
            library = ctypes.CDLL(None)
            library.mallopt(_MMAP_THRESHOLD, size)
            library.mallopt(_TRIM_THRESHOLD, 2 * size)
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
