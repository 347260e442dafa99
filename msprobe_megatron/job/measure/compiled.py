"""Tensors in host memory through the compiled kernel: all statistics of a slot in one call.

The fast path of ``stats`` and ``digest``. It rejects what the kernel cannot read, and the caller falls back to torch.
A tensor is read through its address: no torch operation, no change of its version counter.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch

from msprobe_megatron.job.measure.flatten import is_dense
from msprobe_megatron.job.measure.native import Kernel, library
from msprobe_megatron.job.measure.plans import STATISTICS_ONLY, Plan, in_memory_order, make_plan
from msprobe_megatron.run_directory.digest import Numbering

_PLANS_KEPT = 4096
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_strided = torch.strided
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

_CODES = {
    "float32": library.FLOAT32,
    "float64": library.FLOAT64,
    "bfloat16": library.BFLOAT16,
    "float16": library.FLOAT16,
    "int16": library.INT16,
    "int32": library.INT32,
    "int64": library.INT64,
    "uint16": library.UINT16,
    "uint32": library.UINT32,
    "uint64": library.UINT64,
}
_BYTES = (
    *("bool", "uint8", "int8"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


class Compiled:
    """Measures tensors into slots given by their address: 5 doubles, 4 counts, then digest and sketch if requested."""

    def __init__(self, kernel: Kernel, *, digest: bool = False, sketch: int = 0) -> None:
        self._stats, self._measure = kernel.stats, kernel.measure
        self.many = kernel.many
        """Address of a table of tensors, and their number: see `measure.many`."""
        self.numbered = digest or sketch > 0
        self._cells = sketch if self.numbered else STATISTICS_ONLY
        self._plans: dict[Any, Plan | None] = {}
        self._tables = {name: _values_of(name) for name in _BYTES if hasattr(torch, name)}
        self.codes: dict[torch.dtype, tuple[int, int]] = {
            getattr(torch, name): (code, 0) for name, code in _CODES.items() if hasattr(torch, name)
        }
        for name, table in self._tables.items():
            self.codes[getattr(torch, name)] = (library.BYTE, table.buffer_info()[0])

    def readable(self, x: torch.Tensor) -> tuple[int, int] | None:
        """Code of the dtype and address of its table of values; None when this is no tensor for the kernel."""
        found = self.codes.get(x.dtype)
        if found is None or type(x) not in _PLAIN_TYPES or not x.is_cpu or x.layout is not _strided:
            return None
        return None if (not x.data_ptr() and x.numel()) or x.is_neg() or _is_wrapped(x) else found

    def __call__(self, x: torch.Tensor, address: int, numbering: Numbering | None = None) -> bool:
        """Fill the slot at ``address``; False, with the slot untouched, when this is no tensor for the kernel."""
        found = self.codes.get(x.dtype)
        if found is None or type(x) not in _PLAIN_TYPES or not x.is_cpu or x.layout is not _strided:
            return False
        pointer, numel = x.data_ptr(), x.numel()
        # A lazy negative says something else than its memory; a freed storage has no memory.
        if (not pointer and numel) or x.is_neg() or _is_wrapped(x):
            return False
        code, values = found
        if not self.numbered and x.is_contiguous():
            self._stats(pointer, numel, code, values, address)
            return True
        plan = self._plan(x, found, numbering)
        if plan is None:
            self._stats(pointer, numel, code, values, address)
        else:
            self._measure(pointer, plan.address, address)
        return True

    def plan(self, x: torch.Tensor, numbering: Numbering | None) -> Plan:
        """How the kernel walks through tensors like ``x``, which is `readable`, and numbers their elements."""
        found = self._plan(x, self.codes[x.dtype], numbering)
        if found is None:
            raise ValueError("elements are numbered where a digest or a sketch is requested")
        return found

    def _plan(self, x: torch.Tensor, coded: tuple[int, int], numbering: Numbering | None) -> Plan | None:
        key = (*coded, x.shape, x.stride(), id(numbering))
        return self._plans[key] if key in self._plans else self._new_plan(key, x, numbering)

    def _new_plan(self, key: Any, x: torch.Tensor, numbering: Numbering | None) -> Plan | None:
        if len(self._plans) >= _PLANS_KEPT:
            self._plans.clear()
        plan = None
        # Statistics do not depend on the order: what fills its memory is read as it lies.
        if self.numbered or not is_dense(x):
            code, values, shape, strides, _ = key
            if not self.numbered:  # in the order of the memory, as `msprobe_strided` reads it
                numbering = None
                shape, strides = in_memory_order(shape, strides)
            plan = make_plan(code, values, shape, strides, numbering, self._cells)
            plan = plan._replace(held=(*plan.held, numbering))  # its identity is part of the key
        self._plans[key] = plan
        return plan


def _values_of(name: str) -> array[float]:
    """What each of the 256 bytes stands for in an 8-bit dtype."""
    with torch.inference_mode(False), torch.no_grad():
        codes = torch.arange(256, dtype=torch.uint8, device="cpu")
        if name == "bool":
            return array("d", [0.0] + [1.0] * 255)
        return array("d", codes.view(getattr(torch, name)).to(torch.float32).tolist())
