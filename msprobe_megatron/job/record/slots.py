"""The slot table: statistics stay on the device that computed them until the step is over.

A probe takes a slot, ``measure`` fills its row, and at the end of the step ``seal`` starts one copy to the
host. The writer thread waits for the copies; the device never waits for the host.
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

from msprobe_megatron.run_directory.schema import COUNT_COLUMNS, FLOAT_COLUMNS

if TYPE_CHECKING:
    from msprobe_megatron.job.devices.base import Backend, HostCopy

_FLOATS, _COUNTS = len(FLOAT_COLUMNS), len(COUNT_COLUMNS)
_WORD = 8
VIEW_BYTES = 640
"""Upper estimate of the host memory of the tensor object through which a slot is written."""


@dataclass(frozen=True)
class _Clone:
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


def clone_to_host(tensor: torch.Tensor) -> HostCopy:
    """Copy synchronously: for tables in host memory, and for tests.

    Example::

        >>> clone_to_host(torch.ones(2)).wait()
        tensor([1., 1.])
    """
    return _Clone(tensor.detach().clone().cpu())


class SealedSlots:
    """The statistics of one finished step, on their way to the host."""

    def __init__(
        self,
        copies: list[HostCopy],
        words: int,
        float_dtype: torch.dtype,
        slots: int,
        more: int = 0,
        host_rows: dict[int, torch.Tensor] | None = None,
        finish: Callable[[npt.NDArray[np.int64]], None] | None = None,
    ) -> None:
        self._copies, self._words, self._slots, self._more = copies, words, slots, more
        self._host_rows, self._finish = host_rows or {}, finish
        self._float: npt.DTypeLike = np.float64 if float_dtype is torch.float64 else np.float32

    def __len__(self) -> int:
        return self._slots

    @property
    def nbytes(self) -> int:
        """Host memory that the copies take."""
        return self._slots * self._words * _WORD

    def wait(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the statistics as arrays of (slots, 5) and (slots, 4). For the writer thread: this may block.

        A slot that was taken and never filled reads NaN and -1.
        """
        words = self._arrived()
        floats = words.view(self._float)[:, :_FLOATS].astype(np.float64, copy=False)
        first = self._words - self._more - _COUNTS
        return floats, words[:, first : first + _COUNTS]

    def numbered(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]] | None:
        """Return digests (slots,) and sketches (slots, cells), or None if the table has none. May block."""
        if not self._more:
            return None
        words, first = self._arrived(), self._words - self._more
        digests = np.ascontiguousarray(words[:, first]).view(np.uint64)
        cells = np.ascontiguousarray(words[:, first + 1 :]).view(self._float)
        return digests, cells[:, : self._more - 1].astype(np.float32)

    def _arrived(self) -> npt.NDArray[np.int64]:
        blocks: list[npt.NDArray[np.int64]] = [copy.wait().numpy() for copy in self._copies]
        if len(blocks) == 1:
            words = blocks[0]
        else:
            words = np.concatenate(blocks) if blocks else np.empty((0, self._words), np.int64)
        for slot, row in self._host_rows.items():
            if slot < len(words):
                words[slot] = row.numpy()
        if self._finish is not None:
            self._finish(words)
        return words


class SlotTable:
    """Rows of statistics on a device, in blocks that are allocated on demand and reused every step.

    Floats and counts of a slot lie side by side in one block of 64-bit words, so that one copy transfers
    both. ``to_host`` must order its copy before later work on the current stream: the table is reused
    at once. `take` is thread-safe; `seal` belongs between steps. ``limit_bytes`` bounds the memory of
    blocks and views together.
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
        self._more = (1 + sketch) if digest or sketch else 0
        self.has_digests = self._more > 0
        """Whether every slot has a word for a digest."""
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
        self._blank = torch.empty(0)  # an unfilled slot; made with the first block
        self.rows: list[torch.Tensor] = []
        """All words of each slot: floats, counts, digest, cells."""
        self.device = device
        self.on_host = device.type == "cpu" and float_dtype is torch.float64
        self.addresses: list[int] = []
        """Address of each slot, for kernels that write to host memory; only for a table ``on_host``."""
        self._next: Iterator[int] = itertools.count()
        self._restart: Callable[[], Iterator[int]] = itertools.count
        self._growing = threading.Lock()
        self._invalid: list[int] = []
        self._host_rows: dict[int, torch.Tensor] = {}
        self._finish: Callable[[npt.NDArray[np.int64]], None] | None = None
        self.dropped = 0
        """Slots refused because of the limit, since the table was made."""

    @classmethod
    def on(
        cls, device: Backend, limit_bytes: int, rows_per_block: int = 1024, *, digest: bool = False, sketch: int = 0
    ) -> SlotTable:
        """Return a table in the memory of ``device``, with the widest accumulators that it has."""
        return cls(
            device.device,
            rows_per_block,
            float_dtype=device.float_dtype,
            limit_bytes=limit_bytes,
            to_host=device.to_host,
            digest=digest,
            sketch=sketch,
        )

    @property
    def nbytes(self) -> int:
        """Memory in use, device and host together."""
        return len(self._blocks) * self._block_bytes

    def take(self) -> int:
        """Return a free slot, or -1 (counted in ``dropped``) when the limit is reached."""
        slot = next(self._next)  # atomic, unlike adding one to an attribute
        return slot if slot < len(self.rows) else self.grow(slot)

    def count_by(self, restart: Callable[[], Iterator[int]]) -> None:
        """Number slots by a counter that compiled code can advance by itself. Call before the first slot is taken.

        ``restart`` returns it, counting from 0. A number beyond ``rows`` must be passed to `grow`.
        """
        self._restart, self._next = restart, restart()

    def finish_by(self, finish: Callable[[npt.NDArray[np.int64]], None]) -> None:
        """Complete rows by this, in place and idempotent, once they are on the host: in the writer thread."""
        self._finish = finish

    def invalidate(self, slot: int) -> None:
        """A slot was written after its step was sealed; its new owner must read null."""
        if slot >= 0:
            self._invalid.append(slot)
            self._host_rows.pop(slot, None)

    def host_row(self, slot: int) -> torch.Tensor:
        """Return words in host memory that are read in place of those of a slot on a device.

        For a host tensor among those of a device: a copy of its statistics to the device would make the host wait.
        """
        with torch.inference_mode(False), torch.no_grad():
            row = torch.zeros(self._words, dtype=torch.int64, device="cpu")
        self._host_rows[slot] = row
        return row

    def floats(self, slot: int) -> torch.Tensor:
        """Return the view of five floats of a slot."""
        return self.rows[slot].view(self._dtype)[:_FLOATS]

    def counts(self, slot: int) -> torch.Tensor:
        """Return the view of four 64-bit counts of a slot."""
        return self.rows[slot][self._float_words : self._float_words + _COUNTS]

    def spans(self, slots: list[int]) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Return where lines of statistics go: positions in ``slots``, and views of their floats and their counts.

        Consecutive slots of a block are one span.
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
        """Start the copies of all taken slots; the table is empty again when this returns."""
        # By blocks, which are appended first when the table grows: another thread may be growing it right now.
        taken = min(next(self._next), len(self._blocks) * self._rows)
        parts = []
        while self._invalid:
            slot = self._invalid.pop()
            self._blocks[slot // self._rows][slot % self._rows].copy_(self._blank)
        for index, block in enumerate(self._blocks):
            used = min(taken - index * self._rows, self._rows)
            if used <= 0:
                break
            parts.append(block[:used])
        # One copy from a device, however many blocks: each would be a transfer and an event of its own.
        together = [torch.cat(parts)] if len(parts) > 1 and self._device.type != "cpu" else parts
        copies = [self._to_host(part) for part in together]
        for part in parts:
            # A slot that is taken and then not filled must not show the statistics of an earlier step.
            part.copy_(self._blank)
        self._next = self._restart()
        host_rows, self._host_rows = self._host_rows, {}
        return SealedSlots(copies, self._words, self._dtype, taken, self._more, host_rows, self._finish)

    def grow(self, slot: int) -> int:
        """Allocate memory for a slot that was taken; -1 (counted in ``dropped``) when the limit is reached."""
        with self._growing:
            while slot >= len(self.rows):
                if len(self._blocks) >= self._most_blocks:
                    self.dropped += 1
                    return -1
                # Blocks made in inference mode could not be written to outside it.
                with torch.inference_mode(False), torch.no_grad():
                    block = torch.zeros((self._rows, self._words), dtype=torch.int64, device=self._device)
                    block.view(self._dtype)[:, :_FLOATS].fill_(torch.nan)
                    block[:, self._float_words : self._float_words + _COUNTS].fill_(-1)
                    if not self._blocks:
                        self._blank = block[0].clone()
                    self._blocks.append(block)
                    if self.on_host:
                        base, row = block.data_ptr(), self._words * _WORD
                        self.addresses.extend(range(base, base + self._rows * row, row))
                    # Last, because `take` checks this one.
                    self.rows.extend(block.unbind(0))
        return slot
