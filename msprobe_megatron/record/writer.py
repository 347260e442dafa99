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
from dataclasses import asdict, dataclass
from typing import Any

from msprobe_megatron.record.directory import RunDirectory, put
from msprobe_megatron.record.json_text import json_text
from msprobe_megatron.record.nonfinite import origin
from msprobe_megatron.record.schema import IDENTITY_COLUMNS, Row
from msprobe_megatron.record.slots import SealedSlots
from msprobe_megatron.record.table import build_table
from msprobe_megatron.record.tensors import TensorPack
from msprobe_megatron.record.tensors_layout import file_name

ROW_BYTES = 512
"""Memory of a waiting row: the tuple, its numbers and its shape; names are shared between rows."""
POLICIES = ("block", "drop")


@dataclass(frozen=True)
class StepBatch:
    """All that one rank saw of one step. ``complete`` is False when the step was cut short."""

    step: int
    rows: list[Row]
    slots: SealedSlots
    sites: dict[str, Any]
    complete: bool
    only_nonfinite: bool = False

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that the batch holds while it waits."""
        return self.slots.nbytes + ROW_BYTES * (1 + len(self.rows) + len(self.sites))


@dataclass
class WriterCounts:
    """What became of the batches: every one is in the end written or dropped."""

    steps_written: int = 0
    rows_written: int = 0
    bytes_written: int = 0
    steps_dropped: int = 0
    rows_dropped: int = 0
    bytes_dropped: int = 0
    tensors_written: int = 0
    tensors_dropped: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counts for the ledger.

        Example::

            writer.counts.as_dict()["rows_written"]
        """
        return asdict(self)


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
        self._disk, self._on_limit, self._disk_full, self._step_bytes = disk_bytes, on_limit, False, 0
        self._queue: deque[tuple[StepBatch | TensorPack, int]] = deque()  # with the size it was let in for
        self._held_bytes = 0  # queued and in work
        self._changed = threading.Condition()
        self._closing = self._faulted = False
        self._pid = os.getpid()
        self.counts = WriterCounts()
        self._sites: dict[str, Any] | None = None
        self._sites_path = ""
        # At once and not with the first batch: an interpreter that is shutting down starts no threads.
        self._thread = threading.Thread(target=self._run, name="msprobe-writer", daemon=True)
        self._thread.start()

    def submit(self, batch: StepBatch | TensorPack) -> bool:
        """Hand over a step or a pack of tensors; False when it was dropped.

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

    def _drop(self, batch: StepBatch | TensorPack) -> None:
        if isinstance(batch, TensorPack):
            self.counts.tensors_dropped += len(batch.copies)
        else:
            self.counts.steps_dropped += 1
            self.counts.rows_dropped += len(batch.rows)
        self.counts.bytes_dropped += batch.nbytes

    def _over_limit(self, batch: StepBatch | TensorPack) -> bool:
        """Whether the disk limit leaves no room; the files of a step are taken to be as large as those of the last."""
        if self._disk is None:
            return False
        coming = batch.nbytes if isinstance(batch, TensorPack) else self._step_bytes
        over = self.counts.bytes_written + coming >= self._disk
        if over and not self._disk_full:
            self._disk_full = True
            with contextlib.suppress(Exception):
                self._on_limit(f"limits.disk: {self._disk} bytes are used up; what comes now is dropped and counted")
        return over

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                batch, size = self._queue.popleft()
            written, error = 0, None
            dropped = self._over_limit(batch)
            if not self._faulted and not dropped:
                try:
                    written = self._write(batch)
                except BaseException as caught:
                    error = caught
            if error is not None:
                self._faulted = True
                with contextlib.suppress(Exception):  # the messenger's own fault must not end this thread
                    self._on_fault(error)
            with self._changed:
                if self._faulted or dropped:
                    self._drop(batch)
                else:
                    self._count(batch, written)
                self._held_bytes -= size
                self._changed.notify_all()
            del batch

    def _count(self, batch: StepBatch | TensorPack, written: int) -> None:
        if isinstance(batch, TensorPack):
            self.counts.tensors_written += len(batch.copies)
        else:
            self.counts.steps_written += 1
            self.counts.rows_written += len(batch.rows)
            self._step_bytes = written
        self.counts.bytes_written += written

    def _write(self, batch: StepBatch | TensorPack) -> int:
        folder = f"step_{batch.step:06d}/rank_{self._identity['rank']:05d}"
        if isinstance(batch, TensorPack):
            return self._directory.write_file(f"{folder}/{file_name(batch.number)}", batch.fill)
        floats, counts = batch.slots.wait()
        rows = origin(batch.rows, counts) if batch.only_nonfinite else batch.rows
        table = build_table(batch.step, rows, floats, counts, self._identity, batch.slots.numbered())
        table = table.replace_schema_metadata(
            {**table.schema.metadata, b"complete": b"true" if batch.complete else b"false"}
        )
        # Sites first: who sees records then also finds what they point to.
        size = self._write_sites(batch.sites, f"{folder}/sites.json")
        return size + self._directory.write_table(f"{folder}/records.parquet", table)

    def _write_sites(self, sites: Mapping[str, Any], path: str) -> int:
        """The sites as JSON; those of most steps are the very objects of the step before, and so is the file."""
        last = self._sites
        same = last is not None and last.keys() == sites.keys() and all(last[key] is sites[key] for key in sites)
        if same and (repeated := self._directory.repeat_file(self._sites_path, path)) is not None:
            return repeated
        text = ",\n ".join(f"{json_text(key)}: {json_text(value)}" for key, value in sites.items())
        size = self._directory.write_file(path, lambda file: put(file, f"{{{text}}}".encode("ascii")))
        self._sites, self._sites_path = dict(sites), path
        return size
