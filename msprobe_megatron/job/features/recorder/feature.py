"""The flight recorder of one session: the last steps in memory, written out when something happens.

It is a dump of modules, parameters and gradients (L0 statistics, no stacks) of every step whose batches go into a ring
instead of to the writer. The writer thread looks at each for NaN and Inf when its figures have arrived; alerts,
exceptions and signals come from where they happen. What is written are ordinary steps of the run directory.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msprobe_megatron.clock import Moment
from msprobe_megatron.config import DumpConfig, RecorderConfig
from msprobe_megatron.dumping import Dumping
from msprobe_megatron.last_words import LAST_WORDS
from msprobe_megatron.parts import Job, Part
from msprobe_megatron.record.batches import StepBatch, WriterCounts
from msprobe_megatron.record.directory import RunDirectory
from msprobe_megatron.record.schema import IDENTITY_COLUMNS, Row
from msprobe_megatron.record.sightings import rows_of
from msprobe_megatron.recorder_calls import AHEAD, Call, RecorderCalls

Batches = tuple[StepBatch, ...]


class FlightRecorder(Part):
    """What the `recorder` section of the probe file asks.

    Example::

        recorder = FlightRecorder(job, config.recorder)
        recorder.keep("alert spike", step=7)
    """

    name = "recorder"

    def __init__(self, job: Job, asked: RecorderConfig) -> None:
        self.asked, self._job = asked, job
        # What it writes, and whether, depends on what happens: there is nothing to announce.
        inner = replace(job, submit=self._take)
        self._dump = Dumping(inner, DumpConfig(level="L0", stacks=False), announces=False)
        # Other ranks call a little late: what led to their step must still be here.
        self._calls = RecorderCalls(job.directory.path, job.where.rank) if job.where.world > 1 else None
        self._called: list[Call] = []
        self._ring: deque[StepBatch] = deque(maxlen=asked.keep_steps + (AHEAD if self._calls is not None else 0))
        self._looked: Batches = ()
        self._bad: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()
        self._limit = job.config.limits.host_memory // 4
        self._identity = {"rank": job.where.rank, **job.where.position()}
        self._identity = {name: self._identity[name] for name in IDENTITY_COLUMNS}
        self._last = -1
        self.written: dict[int, str] = {}
        self._times = self._too_large = self._missed = 0
        self._notes = LAST_WORDS.add(self._ending, signals="signal" in asked.on)
        # A signal leaves no time to load what writes files.
        import pyarrow.parquet  # noqa: F401

    # What a part is told: the dump inside does it.

    def next_from(self, step: int) -> int | None:
        """Every step that the dump does not record anyway."""
        dumped = self._job.config.dump is not None and step in self._job.config.steps
        return step + 1 if dumped else step

    def describe(self) -> str:
        """How much is kept, and when it is written."""
        return f"keeping the last {self.asked.keep_steps} steps for {', '.join(self.asked.on)} and exceptions"

    def begin(self) -> None:
        """Every step is recorded, into memory."""
        self._dump.begin()

    def microbatch(self, moment: Moment) -> None:
        """As the dump."""
        self._dump.microbatch(moment)

    def reported(self, entry: Any, moment: Moment) -> None:
        """As the dump."""
        self._dump.reported(entry, moment)

    def calls_end(self) -> None:
        """As the dump."""
        self._dump.calls_end()

    def pause(self) -> None:
        """As the dump."""
        self._dump.pause()

    def resume(self) -> None:
        """As the dump."""
        self._dump.resume()

    def memory_changed(self) -> None:
        """As the dump."""
        self._dump.memory_changed()

    def before_optimizer(self) -> None:
        """As the dump."""
        self._dump.before_optimizer()

    def remove(self) -> None:
        """As the dump."""
        self._dump.remove()

    def finish(self, complete: bool) -> None:
        """The step is over: it takes its place in the ring. One that was cut short has it written out."""
        self._dump.finish(complete)
        kept = self._now()
        if not complete:
            self._write("a step that did not end", self._job.clock.step, kept)
        elif kept:
            self._job.submit(Look(kept[-1], self, kept, self._all()))

    def close(self) -> None:
        """The run is over; if an exception ends it, that is a reason to write."""
        LAST_WORDS.remove(self._ending)
        kind = sys.exc_info()[0]
        if kind is not None and issubclass(kind, Exception):
            self._ending(f"exception {kind.__name__}")
        elif self._ring:
            # After the last figures: what another rank says of the last steps.
            self._job.submit(Listen(self._ring[-1], self, (), self._all()))
        with self._lock:  # another thread may be writing: the process must not end before it
            pass

    def ledger(self) -> dict[str, Any]:
        """What was written, why, and what could not be armed."""
        return {
            "kept": [batch.step for batch in self._now()],
            "written": self.written,
            "too_large": self._too_large,
            "missed": self._missed,
            "notes": [*self._notes, *([f"other ranks are not heard: {fault}"] if (fault := self._deaf()) else [])],
            "bound": self._dump.ledger().get("bound", {}),
        }

    # The ring and its ways out.

    def _take(self, batch: StepBatch) -> bool:
        self._ring.append(batch)
        # Only the training thread appends and drops: others take a copy of the whole ring at once.
        while len(self._ring) > 1 and sum(kept.nbytes for kept in self._ring) > self._limit:
            self._ring.popleft()
            self._too_large += len(self._ring) < self.asked.keep_steps
            if self._too_large == 1:
                text = (
                    f"the flight recorder keeps {len(self._ring)} steps: more are over a quarter of limits.host_memory"
                )
                self._job.say(text, "drop")
        return True

    def look(self, batch: StepBatch, kept: Batches) -> None:
        """In the writer thread: the figures of a step have arrived. A tensor that goes non-finite is a reason."""
        self._looked = kept
        if "nonfinite" not in self.asked.on:
            return
        _, counts = batch.slots.wait()
        bad = np.asarray((counts[:, :3] > 0).any(axis=1))
        if not bad.any():
            return
        rows = [row for row in rows_of(batch.rows) if row.slot >= 0 and bad[row.slot]]
        found = {(row.kind, row.name, row.io, row.path) for row in rows}
        # A mask of -Inf is there at every step: what was bad before is no news.
        new = found - self._bad
        self._bad |= found
        if new and (self._last < 0 or batch.step - self._last >= self.asked.keep_steps):
            first = min((row for row in rows if (row.kind, row.name, row.io, row.path) in new), key=_seq)
            self._write(f"non-finite {first.name} {first.io} ({first.kind})", batch.step, kept, call=True)

    def listen(self, batches: Batches, last: bool = False) -> None:
        """In the writer thread: what another rank has written up to its step, this one writes too."""
        if self._calls is None:
            return
        self._called += self._calls.news()
        for call in [call for call in self._called if last or call.step <= batches[-1].step]:
            self._called.remove(call)
            led = tuple(b for b in batches if call.step - self.asked.keep_steps < b.step <= call.step)
            self._missed += not led
            self._write(f"{call.reason} on rank {call.rank}", call.step, led)

    def _deaf(self) -> str:
        return self._calls.fault if self._calls is not None else ""

    def keep(self, reason: str, step: int) -> None:
        """Something else saw a reason in the figures of `step`; what led to it is what was kept then."""
        looked = self._looked
        self._write(reason, step, looked if looked and looked[-1].step >= step else self._now(), call=True)

    def _ending(self, reason: str) -> None:
        # Who is about to end has no time for the others, and whoever ends it ends them too.
        self._write(reason, self._job.clock.step, self._now(), call=reason.endswith("SIGUSR1"))

    def _now(self) -> Batches:
        return self._all()[-self.asked.keep_steps :]

    def _all(self) -> Batches:
        while True:
            try:
                return tuple(self._ring)
            except RuntimeError:  # the training thread appended in between
                continue

    def _write(self, reason: str, step: int, batches: Batches, call: bool = False) -> None:
        with self._lock:
            new = [batch for batch in batches if not self._there(batch)]
            if self._times >= self.asked.times or not new:
                return
            self._times, self._last = self._times + 1, step
            for batch in new:
                batch.write(self._job.directory, self._identity)
                self.written[batch.step] = reason
            steps = [batch.step for batch in new]
            text = f"flight recorder: steps {steps} are written: {reason}"
            event = {"event": "recorder", "rank": self._job.where.rank, "step": step, "reason": reason}
            self._job.directory.append_event({**event, "steps": steps, "text": text})
        if self._calls is not None and call:
            self._calls.post(min(step, batches[-1].step), reason)
        with contextlib.suppress(OSError, ValueError):
            print(f"msprobe [rank {self._job.where.rank}]: {text}", file=sys.stderr, flush=True)

    def _there(self, batch: StepBatch) -> bool:
        """Whether the step is on disk: written before, or by the dump."""
        records = f"step_{batch.step:06d}/rank_{self._identity['rank']:05d}/records.parquet"
        return batch.step in self.written or (self._job.directory.path / records).exists()


@dataclass(frozen=True)
class Look:
    """Goes through the writer's queue and writes nothing: the recorder looks at a step when its figures are there."""

    batch: StepBatch
    recorder: FlightRecorder
    kept: Batches
    there: Batches
    """All that is in the ring: with what is kept, a few steps before it."""

    @property
    def step(self) -> int:
        """The step to look at."""
        return self.batch.step

    @property
    def nbytes(self) -> int:
        """What the queue keeps alive beyond the ring, at most."""
        return self.batch.nbytes

    def coming(self, last: int) -> int:
        """No file of the writer's."""
        return 0

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Look, then listen: what this rank sees itself is its own reason."""
        self.recorder.look(self.batch, self.kept)
        self.recorder.listen(self.there)
        return 0

    def count(self, counts: WriterCounts) -> None:
        """Not a step that was written."""

    def drop(self, counts: WriterCounts) -> None:
        """Nothing was lost that had been asked for."""


class Listen(Look):
    """The last of them: hears what other ranks have called, and looks at nothing."""

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Listen once more; nothing will come after it."""
        self.recorder.listen(self.there, last=True)
        return 0


def _seq(row: Row) -> int:
    return row.seq
