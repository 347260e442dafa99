"""``msprobe::measure_into_slot``: one call that measures a tensor into the row of a slot, on any device.

| device | implementation |
|---|---|
| CPU | the compiled kernel, else torch |
| CUDA, ROCm | the fused Triton kernel: one launch |
| NPU | the same through triton-ascend where that is installed |
| others, and where Triton does not work | few operations of torch: `aten` |

A backend may bring its own: what is registered for its dispatch key when `prepare` is called stays. The second
operator, ``msprobe::measure_into_slots``, measures contiguous tensors of one device together.

Compiled probes call it through torch's dispatcher (`sites/compiled/device_slots.h`), others from Python. For 64
elements, from Python on one core of the machine that BENCHMARKS.md names: the compiled kernel called directly, as is
done for tensors in host memory, 1.1 microseconds; this operator on the CPU 3, on the simulated device, which runs the
same implementation, 4; `aten` on the simulated device 30. Nothing was timed on a real device.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from msprobe_megatron.job.measure import aten, native
from msprobe_megatron.job.measure.compiled import Compiled
from msprobe_megatron.job.measure.stats import flattened, measure_into, write_neutral
from msprobe_megatron.run_directory.digest import Numbering, numbered_into

NAME, NAME_MANY = "measure_into_slot", "measure_into_slots"
STATISTICS, DIGEST = -1, 0
"""What to measure, in place of a number of cells of a sketch: statistics only, or these and the digest."""
_FLOATS, _COUNTS = 5, 4
_NUMBERINGS_KEPT = 4096

_library: Any = torch.library.Library("msprobe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"{NAME}(Tensor x, Tensor(a!) row, bool wide, int cells, int numbering) -> ()")
_library.define(f"{NAME_MANY}(Tensor[] tensors, Tensor(a!)[] rows, bool wide) -> ()")

measure_into_slot: Callable[[torch.Tensor, torch.Tensor, bool, int, int], None] = getattr(
    torch.ops.msprobe, NAME
).default
"""Fill ``row``, the 64-bit words of a slot, from ``x``, which is `readable` and detached.

The row holds five floats (float64 if ``wide``, else float32 and padded to whole words), four counts, and by ``cells``
the digest and the cells of the sketch in the type of the floats. ``numbering``: as `number_of` says.
"""
measure_into_slots: Callable[[list[torch.Tensor], list[torch.Tensor], bool], None] = getattr(
    torch.ops.msprobe, NAME_MANY
).default
"""Fill the statistics of several rows from contiguous tensors of the rows' device."""


class _Numberings:
    """Numberings by number: an operator takes no nested tuples."""

    known: ClassVar[list[Numbering]] = []
    by_value: ClassVar[dict[Numbering, int]] = {}
    by_identity: ClassVar[dict[int, tuple[int, Numbering]]] = {}


def number_of(numbering: Numbering | None) -> int:
    """The number of a numbering, for an operator; -1 for None: row by row."""
    if numbering is None:
        return -1
    found = _Numberings.by_identity.get(id(numbering))
    if found is not None:
        return found[0]
    if len(_Numberings.by_identity) >= _NUMBERINGS_KEPT:
        _Numberings.by_identity.clear()
    with _preparing:
        number = _Numberings.by_value.get(numbering)
        if number is None:
            number = _Numberings.by_value[numbering] = len(_Numberings.known)
            _Numberings.known.append(numbering)
    # With the object, whose identity is the key.
    _Numberings.by_identity[id(numbering)] = (number, numbering)
    return number


def numbering_of(number: int) -> Numbering | None:
    """The numbering that `number_of` numbered."""
    return None if number < 0 else _Numberings.known[number]


class Implementation(NamedTuple):
    """What measures the tensors of a device."""

    name: str
    """For the user: ``triton``, ``torch: <why>``, or ``registered`` by the backend."""
    together: bool
    """Whether `measure_into_slots` works for the device."""
    finish: Callable[[npt.NDArray[np.int64]], None] | None
    """What completes rows once they are on the host; None where they are complete."""


_preparing = threading.RLock()
_prepared: dict[tuple[str, bool], Implementation] = {}


def prepare(device: torch.device, *, wide: bool) -> Implementation:
    """Register an implementation for a device, unless its backend has registered one; once a process and device.

    Reads back a small result, so not for use in a step.
    """
    with _preparing:
        key = (device.type, wide)
        if key not in _prepared:
            _prepared[key] = _prepare(device, wide)
        return _prepared[key]


def _dispatch_key(kind: str) -> str:
    name_of = getattr(torch._C, "_dispatch_key_for_device", None)
    if name_of is not None:
        return str(name_of(kind))
    # torch 2.1: a backend of another package, such as torch_npu, has the private key.
    return {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "meta": "Meta"}.get(kind, "PrivateUse1")


def _prepare(device: torch.device, wide: bool) -> Implementation:
    key = _dispatch_key(device.type)
    if device.type == "cpu":
        return Implementation(f"torch: {native.why_not()}" if native.kernel() is None else "compiled", True, None)
    mine = any(kind == device.type for kind, _ in _prepared)
    if not mine and torch._C._dispatch_has_kernel_for_dispatch_key(f"msprobe::{NAME}", key):
        many = torch._C._dispatch_has_kernel_for_dispatch_key(f"msprobe::{NAME_MANY}", key)
        return Implementation("registered", bool(many), None)
    why = _fused_problem(device, wide)
    if not why:
        from msprobe_megatron.job.measure.fused import operator as fused

        if not mine:
            _library.impl(NAME, fused.measure_into_slot, key)
            _library.impl(NAME_MANY, fused.measure_into_slots, key)
        return Implementation("triton", True, None)
    if not mine:
        _library.impl(NAME, _by_torch, key)
    return Implementation(f"torch: {why}", False, partial(aten.finish, wide=wide))


def _fused_problem(device: torch.device, wide: bool) -> str:
    """Why the fused kernel does not serve a device; empty if it does, and gives the right results."""
    if os.environ.get("MSPROBE_TRITON", "1") == "0":
        return "MSPROBE_TRITON=0"
    if importlib.util.find_spec("triton") is None:
        return "no Triton"
    try:
        from msprobe_megatron.job.measure.fused import operator as fused

        return "" if fused.tells_the_truth(device, wide=wide) else "Triton gives wrong results"
    except Exception as error:  # noqa: BLE001  a compiler that fails, in whatever way, is one that is not there
        return f"Triton: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def _by_torch(x: torch.Tensor, row: torch.Tensor, wide: bool, cells: int, numbering: int) -> None:
    data, times = flattened(x)
    floats = row.view(torch.float64 if wide else torch.float32)
    first = _FLOATS if wide else 3
    if data.numel() == 0:
        write_neutral(floats[:_FLOATS], row[first : first + _COUNTS])
    else:
        aten.measure_into_row(data, times, row, wide=wide)
    if cells >= 0:
        words = row[first + _COUNTS :]
        numbered_into(x, numbering_of(numbering), words[:1], words[1:].view(floats.dtype)[:cells])


class _Host(threading.local):
    """What the CPU implementation works with, a thread: rows of the kernel are float64."""

    def __init__(self) -> None:
        self.compiled: dict[int, Compiled] = {}
        self.rows: dict[int, array[int]] = {}


_host = _Host()


def _on_host(x: torch.Tensor, row: torch.Tensor, wide: bool, cells: int, numbering: int) -> None:
    kernel = native.kernel()
    if kernel is not None:
        compiled = _host.compiled.get(cells)
        if compiled is None:
            compiled = _host.compiled[cells] = Compiled(kernel, digest=cells >= 0, sketch=max(cells, 0))
            _host.rows[cells] = array("q", bytes(8 * (_FLOATS + _COUNTS + 1 + max(cells, 0))))
        into = row.data_ptr() if wide else _host.rows[cells].buffer_info()[0]
        if compiled(x, into, numbering_of(numbering)):
            if not wide:
                kernel.narrow(into, cells, row.data_ptr())
            return
    floats = row.view(torch.float64 if wide else torch.float32)
    first = _FLOATS if wide else 3
    measure_into(x, floats[:_FLOATS], row[first : first + _COUNTS])
    if cells >= 0:
        words = row[first + _COUNTS :]
        numbered_into(x, numbering_of(numbering), words[:1], words[1:].view(floats.dtype)[:cells])


def _many_on_host(tensors: list[torch.Tensor], rows: list[torch.Tensor], wide: bool) -> None:
    for x, row in zip(tensors, rows, strict=True):
        _on_host(x, row, wide, STATISTICS, -1)


_library.impl(NAME, _on_host, "CPU")
_library.impl(NAME_MANY, _many_on_host, "CPU")
