"""All measurements of a tensor into a slot: what probes call.

A table in host memory is filled by the compiled kernel, called directly; every other table by the operator
``msprobe::measure_into_slot``, which has an implementation per device. All give the same extremes, counts and digests;
sums may differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from msprobe_megatron.job.measure import native
from msprobe_megatron.job.measure.compiled import Compiled
from msprobe_megatron.job.measure.operator import DIGEST, STATISTICS, measure_into_slot, number_of, prepare
from msprobe_megatron.job.measure.stats import readable
from msprobe_megatron.run_directory.digest import Numbering


class Slots(Protocol):
    """Where results go: the part of `record.slots.SlotTable` that is used here."""

    addresses: list[int]
    rows: list[torch.Tensor]
    device: torch.device
    on_host: bool
    float_dtype: torch.dtype

    def host_row(self, slot: int) -> torch.Tensor:
        """Words in host memory that are read in place of those of a slot on a device."""

    def finish_by(self, finish: Callable[[Any], None]) -> None:
        """Complete rows by this once they are on the host."""

    def spans(self, slots: list[int]) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Views of floats and counts of slots that lie one after the other."""


class Measurer:
    """Fills the slots of a table."""

    def __init__(self, slots: Slots, *, digest: bool = False, sketch: int = 0) -> None:
        self._slots, self.addresses, self.rows = slots, slots.addresses, slots.rows
        self.cells = sketch or (DIGEST if digest else STATISTICS)
        """What is measured besides statistics, as `measure_into_slot` takes it."""
        kernel = native.kernel()
        self.compiled: Compiled | None = None
        if kernel is not None and slots.on_host:
            self.compiled = Compiled(kernel, digest=digest, sketch=sketch)
        self.on_host, self.float_dtype = slots.on_host, slots.float_dtype
        self.wide = slots.float_dtype is torch.float64
        self.device = slots.device
        self._on_device = slots.device.type != "cpu"
        implementation = prepare(slots.device, wide=self.wide)
        self.together = self._on_device and implementation.together
        """Whether `measure_into_slots` measures several tensors of the device in one launch."""
        self.kernel = implementation.name if self._on_device or kernel is None else kernel.level
        """By what tensors are read: the level of the compiled kernel, ``triton``, or torch and why."""
        if implementation.finish is not None:
            slots.finish_by(implementation.finish)

    def __call__(self, x: torch.Tensor, slot: int, numbering: Numbering | None = None) -> bool:
        """Measure ``x`` into ``slot``; False, with the slot untouched, when ``x`` is not measurable."""
        if self.compiled is not None and self.compiled(x, self.addresses[slot], numbering):
            return True
        found = readable(x)
        if found is None:
            return False
        row = self._slots.host_row(slot) if found.is_cpu and self._on_device else self.rows[slot]
        measure_into_slot(found.data, row, self.wide, self.cells, number_of(numbering))
        return True

    def write(self, slots: list[int], floats: torch.Tensor, counts: torch.Tensor) -> None:
        """Put statistics that were computed together, a line each, into their slots."""
        for lines, into_floats, into_counts in self._slots.spans(slots):
            into_floats.copy_(floats[lines])
            into_counts.copy_(counts[lines])
