"""The slot table: where figures wait, on the device that computed them, until the step is over.

A probe takes a slot, ``measure`` fills its two views, and at the end of the step ``seal`` starts one copy a
block to the host. The writer thread waits for the copies; the device never waits for the host.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from msprobe_megatron.record.schema import COUNT_COLUMNS, FLOAT_COLUMNS

if TYPE_CHECKING:
    from msprobe_megatron.backends.base import HostCopy

_FLOATS, _COUNTS = len(FLOAT_COLUMNS), len(COUNT_COLUMNS)
_WORD = 8
VIEW_BYTES = 2 * 640
"""Host memory of the two tensor objects through which a slot is written, generously."""


@dataclass(frozen=True)
class _Clone:
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


def clone_to_host(tensor: torch.Tensor) -> HostCopy:
    """Copy at once: right for tables in host memory, and for tests.

    Example::

        clone_to_host(torch.ones(2)).wait()
    """
    return _Clone(tensor.detach().clone().cpu())


class SealedSlots:
    """The figures of one finished step, on their way to the host."""

    def __init__(self, copies: list[HostCopy], words: int, float_dtype: torch.dtype, slots: int, more: int = 0) -> None:
        self._copies, self._words, self._slots, self._more = copies, words, slots, more
        self._float: npt.DTypeLike = np.float64 if float_dtype is torch.float64 else np.float32

    def __len__(self) -> int:
        return self._slots

    @property
    def nbytes(self) -> int:
        """Host memory that the copies take."""
        return self._slots * self._words * _WORD

    def wait(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the figures as arrays of (slots, 5) and (slots, 4). For the writer thread: this may wait.

        A slot that was taken and never filled reads NaN and -1.

        Example::

            floats, counts = table.seal().wait()
        """
        words = self._arrived()
        floats = words.view(self._float)[:, :_FLOATS].astype(np.float64, copy=False)
        first = self._words - self._more - _COUNTS
        return floats, words[:, first : first + _COUNTS]

    def numbered(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]] | None:
        """Return digests (slots,) and sketches (slots, cells), or None if the table has none. May wait.

        Example::

            digests, sketches = table.seal().numbered()
        """
        if not self._more:
            return None
        words, first = self._arrived(), self._words - self._more
        digests = np.ascontiguousarray(words[:, first]).view(np.uint64)
        cells = np.ascontiguousarray(words[:, first + 1 :]).view(self._float)
        return digests, cells[:, : self._more - 1].astype(np.float32)

    def _arrived(self) -> npt.NDArray[np.int64]:
        blocks: list[npt.NDArray[np.int64]] = [copy.wait().numpy() for copy in self._copies]
        if len(blocks) == 1:
            return blocks[0]
        return np.concatenate(blocks) if blocks else np.empty((0, self._words), np.int64)


class SlotTable:
    """Rows of figures on a device, in blocks that are made when needed and used again every step.

    Both kinds of figure of a slot lie side by side in one block of 64-bit words, so that one copy brings
    both. ``to_host`` must order its copy before later work on the current stream: the table is used again
    at once. Slots may be taken from several threads; ``seal`` belongs between steps. ``limit_bytes`` bounds
    the memory of blocks and views together.

    Example::

        table = SlotTable(torch.device("cpu"))
        slot = table.take()
        if slot >= 0:
            measure_into(x, table.floats(slot), table.counts(slot))
        floats, counts = table.seal().wait()
    """

    def __init__(
        self,
        device: torch.device,
        rows_per_block: int = 1024,
        *,
        float_dtype: torch.dtype = torch.float64,
        limit_bytes: int = 256 << 20,
        to_host: Callable[[torch.Tensor], HostCopy] = clone_to_host,
        digest: bool = False,
        sketch: int = 0,
    ) -> None:
        if float_dtype not in (torch.float32, torch.float64):
            raise ValueError(f"float_dtype: {float_dtype}; accepted: torch.float64, torch.float32")
        self._device, self._dtype, self._to_host = device, float_dtype, to_host
        self.float_dtype = float_dtype
        self._float_words = -(-_FLOATS * float_dtype.itemsize // _WORD)
        self.sketch_cells = sketch
        self._more = (1 + sketch) if digest or sketch else 0
        self._words = self._float_words + _COUNTS + self._more
        slot_bytes = self._words * _WORD + VIEW_BYTES
        self._rows = min(rows_per_block, limit_bytes // slot_bytes)
        if self._rows < 1:
            raise ValueError(
                f"rows_per_block {rows_per_block}, limit_bytes {limit_bytes}: no room for a slot; "
                f"accepted: at least 1 and {slot_bytes}"
            )
        self._block_bytes = self._rows * slot_bytes
        self._most_blocks = limit_bytes // self._block_bytes
        self._blocks: list[torch.Tensor] = []
        self._blank = torch.empty(0)  # what a slot holds that was not filled; made with the first block
        self._floats: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        self._numbered: list[torch.Tensor] = []
        self.on_host = device.type == "cpu" and float_dtype is torch.float64
        self.addresses: list[int] = []
        """Where each slot lies, for kernels that write to host memory; only for a table ``on_host``."""
        self._next: Iterator[int] = itertools.count()
        self._restart: Callable[[], Iterator[int]] = itertools.count
        self._growing = threading.Lock()
        self._spoilt: list[int] = []
        self.dropped = 0
        """Slots that were asked for beyond the limit, since the table was made."""

    @property
    def nbytes(self) -> int:
        """Memory in use, device and host together."""
        return len(self._blocks) * self._block_bytes

    def take(self) -> int:
        """Return a free slot, or -1 (counted in ``dropped``) when the limit is reached.

        Example::

            slot = table.take()
        """
        slot = next(self._next)  # atomic, unlike adding one to an attribute
        return slot if slot < len(self._counts) else self.grow(slot)

    def count_by(self, restart: Callable[[], Iterator[int]]) -> None:
        """Number slots by another counter, which compiled code can take from without asking; before the first slot.

        ``restart`` gives it, counting from 0. Who takes a number beyond ``addresses`` calls `grow`.

        Example::

            table.count_by(counter.restart)
        """
        self._restart, self._next = restart, restart()

    def spoil(self, slot: int) -> None:
        """Somebody took a slot in a step that is over and filled it only now: whoever has it in this one reads nothing.

        Example::

            if turn != self._turn:
                table.spoil(slot)
        """
        if slot >= 0:
            self._spoilt.append(slot)

    def floats(self, slot: int) -> torch.Tensor:
        """Return the view of five floats of a slot.

        Example::

            table.floats(slot).shape   # (5,)
        """
        return self._floats[slot]

    def counts(self, slot: int) -> torch.Tensor:
        """Return the view of four 64-bit counts of a slot.

        Example::

            table.counts(slot).shape   # (4,)
        """
        return self._counts[slot]

    def numbered(self, slot: int) -> torch.Tensor:
        """Return the 64-bit words of digest and sketch of a slot; the cells lie there as the table's floats.

        Example::

            table.numbered(slot).shape   # (1 + cells,)
        """
        return self._numbered[slot]

    def spans(self, slots: list[int]) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Return where lines of figures go: positions in ``slots``, and views of their floats and their counts.

        Slots that follow each other in a block are one span.

        Example::

            for lines, floats, counts in table.spans([3, 4, 5]):
                floats.copy_(figures[lines])
        """
        found, first = [], 0
        for i in range(1, len(slots) + 1):
            if i < len(slots) and slots[i] == slots[i - 1] + 1 and slots[i] % self._rows:
                continue
            block, row = self._blocks[slots[first] // self._rows], slots[first] % self._rows
            rows = block[row : row + i - first]
            counts = rows[:, self._float_words : self._float_words + _COUNTS]
            found.append((slice(first, i), rows.view(self._dtype)[:, :_FLOATS], counts))
            first = i
        return found if slots else []

    def seal(self) -> SealedSlots:
        """Start the copies of all taken slots; the table is empty again when this returns.

        Example::

            batch = StepBatch(step, rows, table.seal(), sites, complete=True)
        """
        # By blocks, which are noted first when the table grows: another thread may be at it, with slots in use.
        taken = min(next(self._next), len(self._blocks) * self._rows)
        copies = []
        while self._spoilt:
            slot = self._spoilt.pop()
            self._blocks[slot // self._rows][slot % self._rows].copy_(self._blank)
        for index, block in enumerate(self._blocks):
            used = min(taken - index * self._rows, self._rows)
            if used <= 0:
                break
            taken_part = block[:used]
            copies.append(self._to_host(taken_part))
            # A slot that is taken and then not filled must not show the figures of an earlier step.
            taken_part.copy_(self._blank)
        self._next = self._restart()
        return SealedSlots(copies, self._words, self._dtype, taken, self._more)

    def grow(self, slot: int) -> int:
        """Make room for a slot that was taken; -1 (counted in ``dropped``) when the limit is reached.

        Example::

            table.grow(1024)
        """
        with self._growing:
            while slot >= len(self._counts):
                if len(self._blocks) >= self._most_blocks:
                    self.dropped += 1
                    return -1
                # Inference mode would make blocks that cannot be written to outside it.
                with torch.inference_mode(False), torch.no_grad():
                    block = torch.zeros((self._rows, self._words), dtype=torch.int64, device=self._device)
                    floats = block.view(self._dtype)[:, :_FLOATS]
                    counts = block[:, self._float_words : self._float_words + _COUNTS]
                    floats.fill_(torch.nan)
                    counts.fill_(-1)
                    if not self._blocks:
                        self._blank = block[0].clone()
                    self._blocks.append(block)
                    self._floats.extend(floats.unbind(0))
                    if self._more:
                        self._numbered.extend(block[:, -self._more :].unbind(0))
                    if self.on_host:
                        base, row = block.data_ptr(), self._words * _WORD
                        self.addresses.extend(range(base, base + self._rows * row, row))
                    # Last, because this is what `take` looks at.
                    self._counts.extend(counts.unbind(0))
        return slot
