"""Many tensors in one call: the segments of a gradient buffer, the moments of all parameters.

What a probe reads again in every step from the same places in memory. Host memory goes through the compiled kernel by
one table of addresses; that of a device through ``msprobe::measure_into_slots``, a launch a dtype, or where that has no
implementation through `segments`. Tables are made once and checked at every use. What none of them can read goes tensor
by tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from msprobe_megatron.job.measure.measurer import Measurer
from msprobe_megatron.job.measure.operator import measure_into_slots
from msprobe_megatron.job.measure.segments import DTYPES, Segments
from msprobe_megatron.job.measure.stats import readable

_WORDS = 5  # of a line of the table: address, elements, code, values, where the results go


def reads_together(measurer: Measurer) -> bool:
    """Whether few large operations are better than many small ones: each is a launch where memory is not the host's."""
    return measurer.compiled is None and not measurer.on_host


class Many:
    """Measures tensors together, each into its slot; remembers where they were.

    Sums of float tensors are taken in float32 over 512 elements and in float64 beyond.
    """

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._known: tuple[list[tuple[int, int]], list[int]] = ([], [])
        self._table: array[int] = array("q")
        self._rest: list[int] = []
        self._lines = 0
        self._segments: Segments | None = None
        self._together: list[int] = []

    def __call__(self, tensors: Sequence[torch.Tensor], slots: list[int]) -> list[int]:
        """Fill the slots; returns the positions of the tensors that could not be measured."""
        compiled = self._measurer.compiled
        if compiled is None:
            if not reads_together(self._measurer):
                self._rest = list(range(len(slots)))
            else:
                self._read_together(tensors, slots)
        else:
            # A tensor of the same place and size has, in the hands of one caller, also the same dtype.
            known = ([(tensor.data_ptr(), tensor.numel()) for tensor in tensors], slots)
            if known != self._known:
                self._make_table(tensors, known)
            if self._lines:
                compiled.many(self._table.buffer_info()[0], self._lines)
        return [i for i in self._rest if not self._measurer(tensors[i], slots[i])]

    def _read_together(self, tensors: Sequence[torch.Tensor], slots: list[int]) -> None:
        known = ([(tensor.data_ptr(), tensor.numel()) for tensor in tensors], slots)
        if known != self._known:
            self._known = (known[0], list(slots))
            good = [readable(x) is not None and x.is_contiguous() and x.dtype in DTYPES and x.numel() for x in tensors]
            device = next((x.device for x, fine in zip(tensors, good, strict=True) if fine), None)
            self._together = [i for i, x in enumerate(tensors) if good[i] and x.device == device]
            mine = set(self._together)
            self._rest = [i for i in range(len(tensors)) if i not in mine]
            self._segments = None
            if self._together and not self._measurer.together:
                self._segments = Segments([tensors[i].detach() for i in self._together], self._measurer.float_dtype)
        if not self._together:
            return
        some, mine_slots = [tensors[i].detach() for i in self._together], [slots[i] for i in self._together]
        if self._segments is None:
            rows = [self._measurer.rows[slot] for slot in mine_slots]
            measure_into_slots(some, rows, self._measurer.float_dtype is torch.float64)
        else:
            floats, counts = self._segments(some)
            self._measurer.write(mine_slots, floats, counts)

    def _make_table(self, tensors: Sequence[torch.Tensor], known: tuple[list[tuple[int, int]], list[int]]) -> None:
        compiled, addresses = self._measurer.compiled, self._measurer.addresses
        words: list[int] = []
        self._rest = []
        for i, (tensor, slot) in enumerate(zip(tensors, known[1], strict=True)):
            found = compiled.readable(tensor) if compiled is not None and tensor.is_contiguous() else None
            if found is None:
                self._rest.append(i)
            else:
                words += [*known[0][i], *found, addresses[slot]]
        self._known = (known[0], list(known[1]))
        self._table, self._lines = array("q", words), len(words) // _WORDS
