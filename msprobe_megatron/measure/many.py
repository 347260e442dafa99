"""Many tensors in one call: the segments of a gradient buffer, the moments of all parameters.

What a probe reads anew in every step from the same places in memory. Host memory goes through the compiled kernel by
one table of addresses, made once and checked at every use; everything else tensor by tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from msprobe_megatron.measure.measurer import Measurer

_WORDS = 5  # of a line of the table: address, elements, code, values, where the figures go


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

    def __call__(self, tensors: Sequence[torch.Tensor], slots: list[int]) -> list[int]:
        """Fill the slots; returns the positions of the tensors that could not be measured."""
        compiled = self._measurer.compiled
        if compiled is None:
            self._rest = list(range(len(slots)))
        else:
            # A tensor of the same place and size has, in the hands of one caller, also the same dtype.
            known = ([(tensor.data_ptr(), tensor.numel()) for tensor in tensors], slots)
            if known != self._known:
                self._make_table(tensors, known)
            if self._lines:
                compiled.many(self._table.buffer_info()[0], self._lines)
        return [i for i in self._rest if not self._measurer(tensors[i], slots[i])]

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
