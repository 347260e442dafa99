"""The writer thread: takes finished batches from training and turns them into files.

Training submits a `Batch` and continues. The queue is bounded in bytes: when it is full, training waits or the batch
is dropped, as configured, and drops are counted. An error in this thread is reported once and never raised into
training. A new kind of file is a new subclass of `Batch`; the writer knows none of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.run_directory.safe_files import OverAllowance, Unfinished, finish_files
from msprobe_megatron.run_directory.schema import IDENTITY_COLUMNS

POLICIES = ("block", "drop")
ROW_BYTES = 512
"""Memory of a queued row: the tuple, its numbers and its shape; names are shared between rows."""
_TOGETHER = 8
"""Large files that are written before the first fsync, as long as more of them are queued."""


@dataclass
class WriterCounts:
    """Totals for the ledger: every batch ends up written or dropped."""

    steps_written: int = 0
    rows_written: int = 0
    bytes_written: int = 0
    steps_dropped: int = 0
    rows_dropped: int = 0
    bytes_dropped: int = 0
    tensors_written: int = 0
    tensors_dropped: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counts for the ledger."""
        return asdict(self)


class Batch:
    """One item of the writer's queue. A subclass overrides what it needs; by default it writes and counts nothing.

    All methods but `nbytes` run in the writer thread. `count` and `drop` leave ``bytes_*`` to the writer.
    """

    large: ClassVar[bool] = False
    """True for a single file so large that several are best synced together: the writer then calls `begin`."""

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that the batch holds while it is queued."""
        return 0

    def expected_bytes(self, last: int) -> int:
        """Expected size of its files, checked against the disk limit; ``last`` is the size of the last of this type."""
        return 0

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Write the files and return their size; ``identity`` holds the coordinates of this process."""
        return 0

    def begin(self, directory: RunDirectory, identity: Mapping[str, int]) -> Unfinished:
        """Write the file of a `large` batch without syncing it."""
        raise NotImplementedError

    def count(self, counts: WriterCounts) -> None:
        """Add a batch that was written."""

    def drop(self, counts: WriterCounts) -> None:
        """Add a batch that was dropped."""


class StepRowsBatch(Batch):
    """A batch with rows of one step."""

    @property
    def row_count(self) -> int:
        """How many rows it has."""
        raise NotImplementedError

    def expected_bytes(self, last: int) -> int:
        """Steps resemble each other: as large as the last."""
        return last

    def count(self, counts: WriterCounts) -> None:
        """Add one step and its rows."""
        counts.steps_written += 1
        counts.rows_written += self.row_count

    def drop(self, counts: WriterCounts) -> None:
        """Add one lost step and its rows."""
        counts.steps_dropped += 1
        counts.rows_dropped += self.row_count


@dataclass
class _Begun:
    """A batch that left the queue: the size it was admitted with, and its result so far."""

    batch: Batch
    size: int
    file: Unfinished | None = None
    written: int = 0
    lost: bool = True


class Writer:
    """Writes batches in one daemon thread. Thread-safe; in a forked child every call is a no-op.

    ``policy`` says what a full queue does: "block" makes training wait (``block_seconds`` at most, then the
    batch is dropped: a dead disk must not stop a job), "drop" never waits. ``on_fault`` is called once, in
    the writer thread, with the first error; from then on everything is dropped and counted.
    """

    def __init__(
        self,
        directory: RunDirectory,
        identity: Mapping[str, int],
        queue_bytes: int,
        on_fault: Callable[[BaseException], None],
        *,
        policy: str = "block",
        block_seconds: float = 600.0,
        disk_bytes: int | None = None,
        on_limit: Callable[[str], None] = lambda text: None,
    ) -> None:
        absent = [name for name in IDENTITY_COLUMNS if name not in identity]
        if absent:
            raise ValueError(f"identity: {', '.join(absent)} missing; needed: {', '.join(IDENTITY_COLUMNS)}")
        if policy not in POLICIES:
            raise ValueError(f"policy: {policy!r} is unknown; accepted: {', '.join(POLICIES)}")
        self._directory, self._on_fault = directory, on_fault
        self._identity = {name: identity[name] for name in IDENTITY_COLUMNS}
        self._limit, self._policy, self._patience = queue_bytes, policy, block_seconds
        self._disk, self._on_limit, self._disk_full = disk_bytes, on_limit, False
        directory.limit(disk_bytes)
        self._last_bytes: dict[type[Batch], int] = {}
        self._queue: deque[tuple[Batch, int]] = deque()  # with the size it was admitted with
        self._held_bytes = 0  # queued or being written
        self._changed = threading.Condition()
        self._closing = self._faulted = False
        self._pid = os.getpid()
        self.counts = WriterCounts()
        # At once and not with the first batch: an interpreter that is shutting down starts no threads.
        self._thread = threading.Thread(target=self._run, name="msprobe-writer", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> bool:
        """Queue a batch; False when it was dropped."""
        if os.getpid() != self._pid:  # forked: the thread is not here, and the lock may be held for ever
            return False
        size = batch.nbytes
        with self._changed:
            if not self._make_room(size):
                self._drop(batch)
                return False
            self._queue.append((batch, size))
            self._held_bytes += size
            self._changed.notify_all()
        return True

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every submitted batch is written or dropped; False after ``timeout`` seconds."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._held_bytes == 0, timeout)

    def close(self, timeout: float | None = 600.0) -> bool:
        """Write what is queued and end the thread; later batches are dropped. Idempotent."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is self._thread:  # from on_fault: a thread cannot wait for itself
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _make_room(self, size: int) -> bool:
        # A batch larger than the whole queue is admitted when the queue is empty.
        deadline = time.monotonic() + self._patience
        while not self._closing and not self._faulted:
            if self._held_bytes == 0 or self._held_bytes + size <= self._limit:
                return True
            left = deadline - time.monotonic()
            if self._policy == "drop" or left <= 0:
                return False
            self._changed.wait(left)
        return False

    def _drop(self, batch: Batch) -> None:
        batch.drop(self.counts)
        self.counts.bytes_dropped += batch.nbytes

    def _over_limit(self, batch: Batch) -> bool:
        """True if the files of this batch would exceed the disk limit; one that expects none always has its turn."""
        allowance = self._directory.allowance
        if allowance is None:
            return False
        expected = batch.expected_bytes(self._last_bytes.get(type(batch), 0))
        over = 0 < expected >= allowance.left
        if over:
            self._report_full()
        return over

    def _report_full(self) -> None:
        if not self._disk_full:
            self._disk_full = True
            with contextlib.suppress(Exception):
                self._on_limit(f"limits.disk: {self._disk} bytes are used up; further records are dropped and counted")

    def _run(self) -> None:
        begun: list[_Begun] = []
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                batch, size = self._queue.popleft()
            begun.append(self._begin(batch, size))
            del batch
            if not self._go_on(begun):
                self._finish(begun)
                begun = []

    def _begin(self, batch: Batch, size: int) -> _Begun:
        """Write a batch; a large one is not synced yet."""
        found = _Begun(batch, size)
        if self._faulted or self._over_limit(batch):
            return found
        # Sizes are only expected before a batch is written: the directory holds it to what is really left.
        self._directory.tally()
        try:
            if batch.large:
                found.file = batch.begin(self._directory, self._identity)
                found.written = found.file.size
            else:
                found.written = batch.write(self._directory, self._identity)
            found.lost = False
        except OverAllowance:
            # Files of the batch that were complete before the one that did not fit.
            found.written = self._directory.tally()
        except BaseException as error:
            self._fault(error)
        if self._directory.allowance is not None and self._directory.allowance.refused:
            self._report_full()
        return found

    def _go_on(self, begun: list[_Begun]) -> bool:
        """True if the next batch can be synced together with these."""
        with self._changed:
            room = begun[-1].file is not None and len(begun) < _TOGETHER
            return room and bool(self._queue) and self._queue[0][0].large

    def _finish(self, begun: list[_Begun]) -> None:
        files = [one.file for one in begun if one.file is not None]
        try:
            finish_files(files)
        except BaseException as error:
            self._fault(error)
            for one in begun:
                one.lost = one.lost or one.file is not None
        with self._changed:
            for one in begun:
                if one.lost:
                    self._drop(one.batch)
                    self.counts.bytes_written += one.written if one.file is None else 0
                else:
                    self._count(one.batch, one.written)
                self._held_bytes -= one.size
            self._changed.notify_all()

    def _fault(self, error: BaseException) -> None:
        self._faulted = True
        with contextlib.suppress(Exception):  # a failing callback must not end this thread
            self._on_fault(error)

    def _count(self, batch: Batch, written: int) -> None:
        batch.count(self.counts)
        self._last_bytes[type(batch)] = written
        self.counts.bytes_written += written
