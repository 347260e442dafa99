"""Many tensors in one call: the segments of a gradient buffer, the moments of all parameters.

What a probe reads anew in every step from the same places in memory. Host memory goes through the compiled kernel by
one table of addresses, that of other devices through `segments`; tables are made once and checked at every use. What
neither can read goes tensor by tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from msprobe_megatron.measure.measurer import Measurer
from msprobe_megatron.measure.segments import DTYPES, Segments
from msprobe_megatron.measure.stats import readable

_WORDS = 5  # of a line of the table: address, elements, code, values, where the figures go


def reads_together(measurer: Measurer) -> bool:
    """Whether memory is not the host's: there every operation is a launch, and few large ones are what is wanted."""
    return measurer.compiled is None and not measurer.on_host


class Many:
    """Measures tensors together, each into its slot; remembers where they were.

    Sums of float tensors are taken in float32 over 512 elements and in float64 beyond.

    Example::

        many = Many(measurer)
        many([bucket[:10], bucket[10:30]], slots=[0, 1])
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
            some = [tensors[i].detach() for i in self._together]
            self._segments = Segments(some, self._measurer.wide) if some else None
        if self._segments is not None:
            floats, counts = self._segments([tensors[i].detach() for i in self._together])
            self._measurer.write([slots[i] for i in self._together], floats, counts)

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
