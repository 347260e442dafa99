"""The writer thread: takes finished steps from training and turns them into files.

Training hands over a batch and goes on. The queue is bounded in bytes: a full one makes training wait or
drops the batch, as chosen, and drops are counted. Whatever goes wrong here is told once and never raised
into training.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msprobe_megatron.record.batches import Batch, WriterCounts, is_large
from msprobe_megatron.record.directory import RunDirectory
from msprobe_megatron.record.safe_files import Unfinished, finish_files
from msprobe_megatron.record.schema import IDENTITY_COLUMNS

POLICIES = ("block", "drop")
_TOGETHER = 8
"""Large files that are written before the disk is waited for, as long as more of them wait."""


@dataclass
class _Begun:
    """A batch with the size it was let in for, and what became of it so far."""

    batch: Batch
    size: int
    file: Unfinished | None = None
    written: int = 0
    lost: bool = True


class Writer:
    """Writes batches in one daemon thread.

    ``policy`` says what a full queue does: "block" lets training wait (``block_seconds`` at most, then the
    batch is dropped: a dead disk must not stop a job), "drop" never waits. ``on_fault`` is called once, in
    the thread, with the first error; from then on everything is dropped and counted. In a forked child
    every call is a no-op.

    Example::

        identity = {"rank": 3, "tp": 1, "pp": 0, "dp": 0, "cp": 0, "ep": 0, "etp": 0}
        writer = Writer(directory, identity, 64 << 20, on_fault=print)
        writer.submit(StepBatch(10, rows, table.seal(), sites, complete=True))
        writer.close()
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
        self._last_bytes: dict[type[Batch], int] = {}
        self._queue: deque[tuple[Batch, int]] = deque()  # with the size it was let in for
        self._held_bytes = 0  # queued and in work
        self._changed = threading.Condition()
        self._closing = self._faulted = False
        self._pid = os.getpid()
        self.counts = WriterCounts()
        # At once and not with the first batch: an interpreter that is shutting down starts no threads.
        self._thread = threading.Thread(target=self._run, name="msprobe-writer", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> bool:
        """Hand over a batch; False when it was dropped.

        Example::

            writer.submit(batch)
        """
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
        """Wait until all that was handed over is written or dropped; False when ``timeout`` seconds passed.

        Example::

            writer.flush(timeout=60)
        """
        if os.getpid() != self._pid:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._held_bytes == 0, timeout)

    def close(self, timeout: float | None = 600.0) -> bool:
        """Write what waits and end the thread; later batches are dropped. Safe to call twice.

        Example::

            writer.close()
        """
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
        # A batch larger than the whole queue is let in when it has the queue for itself.
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

    def _over_limit(self, batch: Batch, begun: int) -> bool:
        """Whether the disk limit leaves no room for the files of this batch."""
        if self._disk is None:
            return False
        coming = batch.coming(self._last_bytes.get(type(batch), 0))
        over = self.counts.bytes_written + begun + coming >= self._disk
        if over and not self._disk_full:
            self._disk_full = True
            with contextlib.suppress(Exception):
                self._on_limit(f"limits.disk: {self._disk} bytes are used up; what comes now is dropped and counted")
        return over

    def _run(self) -> None:
        begun: list[_Begun] = []
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                batch, size = self._queue.popleft()
            begun.append(self._begin(batch, size, sum(one.written for one in begun)))
            del batch
            if not self._go_on(begun):
                self._finish(begun)
                begun = []

    def _begin(self, batch: Batch, size: int, begun: int) -> _Begun:
        """Write a batch; large ones but for their way to the disk."""
        found = _Begun(batch, size)
        if self._faulted or self._over_limit(batch, begun):
            return found
        try:
            if is_large(batch):
                found.file = batch.begin(self._directory, self._identity)
                found.written = found.file.size
            else:
                found.written = batch.write(self._directory, self._identity)
            found.lost = False
        except BaseException as error:
            self._fault(error)
        return found

    def _go_on(self, begun: list[_Begun]) -> bool:
        """Whether the next batch is one that can go to the disk together with these."""
        with self._changed:
            room = begun[-1].file is not None and len(begun) < _TOGETHER
            return room and bool(self._queue) and is_large(self._queue[0][0])

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
                else:
                    self._count(one.batch, one.written)
                self._held_bytes -= one.size
            self._changed.notify_all()

    def _fault(self, error: BaseException) -> None:
        self._faulted = True
        with contextlib.suppress(Exception):  # the messenger's own fault must not end this thread
            self._on_fault(error)

    def _count(self, batch: Batch, written: int) -> None:
        batch.count(self.counts)
        self._last_bytes[type(batch)] = written
        self.counts.bytes_written += written
