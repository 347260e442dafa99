"""Section `recorder`: the flight recorder keeps the last steps in memory and writes them when something happens.

It records modules, parameters and gradients of every step (L0 statistics, no stacks) as the dump does, into a ring
buffer instead of to the writer. The writer thread inspects each step for NaN and Inf when its statistics have arrived;
alerts, exceptions and signals call `keep` or `_exiting` from their own threads. What is written are ordinary steps of
the run directory. A rank that writes notifies its peers through the job's store, so that they write the same steps.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from msprobe_megatron.config import DumpConfig, RecorderConfig
from msprobe_megatron.job.features.dump.feature import StepRecording
from msprobe_megatron.job.features.feature import JobContext
from msprobe_megatron.job.features.recorder.exit_hooks import EXIT_HOOKS
from msprobe_megatron.job.features.recorder.peers import AHEAD, Call, PeerNotices
from msprobe_megatron.job.messages import warn
from msprobe_megatron.job.record.observations import rows_of
from msprobe_megatron.job.record.step_files import StepBatch
from msprobe_megatron.job.record.writer import Batch
from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.run_directory.safe_files import OverAllowance
from msprobe_megatron.run_directory.schema import IDENTITY_COLUMNS

Batches = tuple[StepBatch, ...]


class RecorderFeature(StepRecording):
    """Keeps every step in memory; writes the kept ones out on the events of `recorder.on`.

    Probe file::

        recorder:
          keep_steps: 4
          on: [nonfinite, alert, signal]
    """

    name = "recorder"

    def __init__(self, job: JobContext, config: RecorderConfig) -> None:
        super().__init__(job, DumpConfig(level="L0", stacks=False))
        self.recorder = config
        # Notices of peers come a little late: what led to their step must still be in the ring.
        self._peers = PeerNotices(job.directory.path, job.where.rank) if job.where.world > 1 else None
        self._notices: list[Call] = []
        self._ring: deque[StepBatch] = deque(maxlen=config.keep_steps + (AHEAD if self._peers is not None else 0))
        self._inspected: Batches = ()
        self._known_bad: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()
        self._limit = job.config.limits.host_memory // 4
        coordinates = {"rank": job.where.rank, **job.where.position()}
        self._identity = {name: coordinates[name] for name in IDENTITY_COLUMNS}
        self._last_reason_step = -1
        self.written: dict[int, str] = {}
        self._times = self._too_large = self._missed = 0
        self._notes = EXIT_HOOKS.add(self._exiting, signals="signal" in config.on)
        # A signal leaves no time to import what writes files.
        import pyarrow.parquet  # noqa: F401

    def next_from(self, step: int) -> int | None:
        """Every step that the dump does not record anyway."""
        dumped = self._job.config.dump is not None and step in self._job.config.steps
        return step + 1 if dumped else step

    def describe(self) -> str:
        """How much is kept, and when it is written."""
        return f"keeping the last {self.recorder.keep_steps} steps for {', '.join(self.recorder.on)} and exceptions"

    def finish(self, complete: bool) -> None:
        """The step is over and enters the ring. A step that was cut short is a reason to write."""
        self._take(self._end_step(complete))
        kept = self._kept()
        if not complete:
            self._write("a step that did not end", self._job.clock.step, kept)
        elif kept:
            self._job.submit(InspectBatch(self, kept[-1], kept, self._all()))

    def close(self) -> None:
        """The run is over; if an exception ends it, that is a reason to write."""
        EXIT_HOOKS.remove(self._exiting)
        kind = sys.exc_info()[0]
        if kind is not None and issubclass(kind, Exception):
            self._exiting(f"exception {kind.__name__}")
        elif self._ring:
            # After the last statistics: notices of peers about the last steps.
            self._job.submit(LastNoticesBatch(self, self._all()))
        with self._lock:  # another thread may be writing: the process must not exit before it is done
            pass

    def ledger(self) -> dict[str, Any]:
        """What was written and why, and what could not be armed."""
        fault = self._peers.fault if self._peers is not None else ""
        return {
            "kept": [batch.step for batch in self._kept()],
            "written": self.written,
            "too_large": self._too_large,
            "missed": self._missed,
            "notes": [*self._notes, *([f"no notices of other ranks: {fault}"] if fault else [])],
            "bound": self._bound(),
        }

    # The ring and the reasons to write it.

    def _take(self, batch: StepBatch) -> None:
        self._ring.append(batch)
        # Only the training thread appends and drops: other threads copy the whole ring at once.
        while len(self._ring) > 1 and sum(kept.nbytes for kept in self._ring) > self._limit:
            self._ring.popleft()
            self._too_large += len(self._ring) < self.recorder.keep_steps
            if self._too_large == 1:
                text = (
                    f"the flight recorder keeps {len(self._ring)} steps: more are over a quarter of limits.host_memory"
                )
                self._job.say(text, "drop")

    def inspect(self, batch: StepBatch, kept: Batches) -> None:
        """In the writer thread: the statistics of a step have arrived. A tensor that becomes non-finite is a reason."""
        self._inspected = kept
        if "nonfinite" not in self.recorder.on:
            return
        _, counts = batch.slots.wait()
        bad = np.asarray((counts[:, :3] > 0).any(axis=1))
        if not bad.any():
            return
        rows = [row for row in rows_of(batch.rows) if row.slot >= 0 and bad[row.slot]]
        found = {(row.kind, row.name, row.io, row.path) for row in rows}
        # A mask of -Inf is there at every step: only a tensor that was finite before is news.
        new = found - self._known_bad
        self._known_bad |= found
        since = batch.step - self._last_reason_step
        if new and (self._last_reason_step < 0 or since >= self.recorder.keep_steps):
            first = min((row for row in rows if (row.kind, row.name, row.io, row.path) in new), key=attrgetter("seq"))
            self._write(f"non-finite {first.name} {first.io} ({first.kind})", batch.step, kept, notify=True)

    def follow_peers(self, batches: Batches, last: bool = False) -> None:
        """In the writer thread: write what led to the steps that other ranks have written."""
        if self._peers is None:
            return
        self._notices += self._peers.news()
        for notice in [notice for notice in self._notices if last or notice.step <= batches[-1].step]:
            self._notices.remove(notice)
            led = tuple(b for b in batches if notice.step - self.recorder.keep_steps < b.step <= notice.step)
            self._missed += not led
            self._write(f"{notice.reason} on rank {notice.rank}", notice.step, led)

    def keep(self, reason: str, step: int) -> None:
        """Write what led to `step`, for a reason that an alert found in its statistics. Thread-safe."""
        inspected = self._inspected
        kept = inspected if inspected and inspected[-1].step >= step else self._kept()
        self._write(reason, step, kept, notify=True)

    def _exiting(self, reason: str) -> None:
        # A dying process does not notify its peers: whatever kills it is killing them too.
        self._write(reason, self._job.clock.step, self._kept(), notify=reason.endswith("SIGUSR1"))

    def _kept(self) -> Batches:
        return self._all()[-self.recorder.keep_steps :]

    def _all(self) -> Batches:
        while True:
            try:
                return tuple(self._ring)
            except RuntimeError:  # the training thread appended in between
                continue

    def _write(self, reason: str, step: int, batches: Batches, notify: bool = False) -> None:
        with self._lock:
            new = [batch for batch in batches if not self._on_disk(batch)]
            if self._times >= self.recorder.times or not new:
                return
            self._times, self._last_reason_step = self._times + 1, step
            steps: list[int] = []
            with contextlib.suppress(OverAllowance):
                for batch in new:
                    batch.write(self._job.directory, self._identity)
                    self.written[batch.step] = reason
                    steps.append(batch.step)
            text = f"flight recorder: steps {steps} are written: {reason}"
            if len(steps) < len(new):
                text += f"; limits.disk left no room for steps {[batch.step for batch in new[len(steps) :]]}"
            event = {"event": "recorder", "rank": self._job.where.rank, "step": step, "reason": reason}
            self._job.directory.append_event({**event, "steps": steps, "text": text})
        if self._peers is not None and notify:
            self._peers.post(min(step, batches[-1].step), reason)
        warn(text, self._job.where.rank)

    def _on_disk(self, batch: StepBatch) -> bool:
        """True if the step was written before, by the recorder or by the dump."""
        records = f"step_{batch.step:06d}/rank_{self._identity['rank']:05d}/records.parquet"
        return batch.step in self.written or (self._job.directory.path / records).exists()


@dataclass(frozen=True)
class InspectBatch(Batch):
    """Writes no file: has the recorder inspect a step when its statistics are there, then follow its peers."""

    recorder: RecorderFeature
    batch: StepBatch
    kept: Batches
    ring: Batches
    """The whole ring: what is kept, and a few steps before it."""

    @property
    def nbytes(self) -> int:
        """What the queue keeps alive beyond the ring, at most."""
        return self.batch.nbytes

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Inspect first: what this rank sees itself is its own reason."""
        self.recorder.inspect(self.batch, self.kept)
        self.recorder.follow_peers(self.ring)
        return directory.tally()


@dataclass(frozen=True)
class LastNoticesBatch(Batch):
    """Writes no file: has the recorder follow its peers once more, at the end of the run."""

    recorder: RecorderFeature
    ring: Batches

    @property
    def nbytes(self) -> int:
        """What the queue keeps alive beyond the ring, at most."""
        return self.ring[-1].nbytes

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Handle all notices that have come so far."""
        self.recorder.follow_peers(self.ring, last=True)
        return directory.tally()
