"""Loads the kernel and checks its results, once per process."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

from msprobe_megatron.job.measure.native.build import Announcing, BuildError, built
from msprobe_megatron.job.measure.native.levels import levels

_ABI = 4
FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT16, INT32, INT64, UINT16, UINT32, UINT64, BYTE = range(11)
"""Codes of the dtypes, as in kernel/vectors.h."""


class Kernel(NamedTuple):
    """The compiled functions; every argument is a number: addresses, counts and codes."""

    level: str
    stats: Callable[[int, int, int, int, int], None]
    measure: Callable[[int, int, int], None]
    many: Callable[[int, int], None]
    pair: Callable[[int, int, int, int, int, int, float, int], None]
    rows: Callable[[int, int, int, int, int, int, int, int, int], None]
    strided: Callable[[int, int, int, int, int, int, int], None]
    narrow: Callable[[int, int, int], None]


class _State:
    """What became of the one attempt of this process."""

    asked = False
    kernel: Kernel | None = None
    reason = "not asked for"


def kernel() -> Kernel | None:
    """The kernel, if `load` has been successful."""
    return _State.kernel


def why_not() -> str:
    """Why there is no kernel; empty if there is one."""
    return _State.reason


def load(timeout: float = 60.0, tell: Callable[[str], None] | None = None) -> Kernel | None:
    """Find or build the kernel, once a process; None, with a reason in `why_not`, where that is impossible.

    ``MSPROBE_NATIVE=0`` in the environment forbids it. ``tell`` gets a message if this or the hooks have to be built.

    Example::

        >>> load() is None
        False
    """
    if not _State.asked:
        _State.asked, Announcing.tell = True, tell
        _State.kernel, _State.reason = _attempt(timeout)
    return _State.kernel


def _attempt(timeout: float) -> tuple[Kernel | None, str]:
    if os.environ.get("MSPROBE_NATIVE", "1") == "0":
        return None, "MSPROBE_NATIVE=0"
    reasons = []
    for level in levels():
        try:
            found = open_library(str(built(level, timeout)), level.name)
        except (BuildError, OSError, AttributeError) as error:
            reasons.append(f"{level.name}: {error}")
            continue
        if _tells_the_truth(found):
            return found, ""
        reasons.append(f"{level.name}: wrong figures")
    return None, "; ".join(reasons)


def open_library(path: str, level: str) -> Kernel:
    """Bind the functions of a library file; raises OSError or AttributeError if it is not ours."""
    # PyDLL keeps the interpreter's lock: giving it up costs more than the short reading of a tensor.
    library = ctypes.PyDLL(path)
    abi = library.msprobe_abi
    abi.restype = ctypes.c_int64
    if abi() != _ABI:
        raise OSError(f"{path}: interface {abi()}, expected {_ABI}")
    stats, measure = library.msprobe_stats, library.msprobe_measure
    address, number = ctypes.c_void_p, ctypes.c_int64
    stats.argtypes, measure.argtypes = [address, number, number, address, address], [address, address, address]
    many = library.msprobe_many
    many.argtypes = [address, number]
    pair = library.msprobe_pair
    pair.argtypes = [address, address, number, number, number, number, ctypes.c_double, address]
    rows = library.msprobe_rows
    rows.argtypes = [address, number, address, address, address, number, number, address, address]
    strided = library.msprobe_strided
    strided.argtypes = [address, number, address, address, number, address, address]
    narrow = library.msprobe_narrow
    narrow.argtypes = [address, number, address]
    functions = (stats, measure, many, pair, rows, strided, narrow)
    for function in functions:
        function.restype = None
    return Kernel(level, *functions)


def _tells_the_truth(found: Kernel) -> bool:
    values = [float(n % 7 - 3) for n in range(37)]
    data, out = (ctypes.c_float * 37)(*values), ctypes.create_string_buffer(72)
    found.stats(ctypes.addressof(data), 37, FLOAT32, 0, ctypes.addressof(out))
    *floats, nans, high, low, zeros = struct.unpack("5d4q", out.raw)
    expected = [-3.0, 3.0, sum(values), sum(v * v for v in values), 3.0]
    return floats == expected and (nans, high, low, zeros) == (0, 0, 0, values.count(0.0))
