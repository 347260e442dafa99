"""All figures of a tensor into a slot, by the fastest way that can read it.

What probes call: host memory goes through the compiled kernel where there is one, everything else through torch.
Both ways give the same figures; sums may differ in their last bits, digests never.
"""

from __future__ import annotations

from typing import Protocol

import torch

from msprobe_megatron import native
from msprobe_megatron.measure.compiled import Compiled
from msprobe_megatron.measure.numbered import numbered_into
from msprobe_megatron.measure.plans import Numbering
from msprobe_megatron.measure.stats import measure_into, readable


class Slots(Protocol):
    """Where figures go: `record.slots.SlotTable`, as far as it matters here."""

    addresses: list[int]
    on_host: bool
    float_dtype: torch.dtype

    def floats(self, slot: int) -> torch.Tensor:
        """View of the five floats of a slot."""

    def counts(self, slot: int) -> torch.Tensor:
        """View of the four counts of a slot."""

    def numbered(self, slot: int) -> torch.Tensor:
        """View of the words of digest and sketch of a slot."""

    def spans(self, slots: list[int]) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Views of floats and counts of slots that lie one after the other."""


class Measurer:
    """Fills the slots of a table.

    Example::

        measurer = Measurer(table)
        slot = table.take()
        measurer(x, slot)          # False: x cannot be measured
    """

    def __init__(self, slots: Slots, *, digest: bool = False, sketch: int = 0) -> None:
        self._slots, self.addresses = slots, slots.addresses
        self._numbered, self._cells = digest or sketch > 0, sketch
        kernel = native.kernel()
        self.compiled: Compiled | None = None
        if kernel is not None and slots.on_host:
            self.compiled = Compiled(kernel, digest=digest, sketch=sketch)
        self.on_host, self.wide = slots.on_host, slots.float_dtype
        self.kernel = f"torch: {native.why_not()}" if kernel is None else kernel.level
        """By what host memory is read: the level of the kernel, or torch and why."""

    def __call__(self, x: torch.Tensor, slot: int, numbering: Numbering | None = None) -> bool:
        """Measure ``x`` into ``slot``; False, with the slot untouched, when ``x`` is not measurable."""
        if self.compiled is not None and self.compiled(x, self.addresses[slot], numbering):
            return True
        floats = self._slots.floats(slot)
        if not measure_into(x, floats, self._slots.counts(slot)):
            return False
        found = readable(x) if self._numbered else None
        if found is not None:
            words = self._slots.numbered(slot)
            cells = words[1:].view(floats.dtype)[: self._cells]
            numbered_into(found.data, numbering, words[:1], cells)
        return True

    def write(self, slots: list[int], floats: torch.Tensor, counts: torch.Tensor) -> None:
        """Put figures that were worked out together, a line each, into their slots.

        Example::

            measurer.write([3, 4], floats, counts)      # (2, 5) and (2, 4)
        """
        for lines, into_floats, into_counts in self._slots.spans(slots):
            into_floats.copy_(floats[lines])
            into_counts.copy_(counts[lines])
