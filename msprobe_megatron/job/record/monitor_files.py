"""What the monitor hands to the writer thread, and the files that it makes of many steps.

A batch is one step: its numbers arrive on the host, watchers are told, and the step joins the file that is being
filled, ``monitor/rank_00003/steps_000000_000099.parquet``. A file is written when its range of steps is full, replaced
as a whole every few seconds before that so that a running job can be watched, and at the end of the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet  # noqa: F401 (with the kit and not with the first file, in the middle of a step)

from msprobe_megatron.record.batches import ROW_BYTES, WriterCounts
from msprobe_megatron.record.directory import RunDirectory
from msprobe_megatron.record.monitor_table import Counts, Figures, Floats, Summed, steps_table
from msprobe_megatron.record.schema import Row
from msprobe_megatron.record.slots import SealedSlots
from msprobe_megatron.record.watching import StepRows, Watcher

MOST_STEPS = 100
"""Watched steps in a file."""
MOST_ROWS = 20_000
"""Rows in a file; what waits to be written takes 72 bytes a row."""
ENOUGH_STEPS = 10
"""A file of fewer steps says little of what a step takes: most of it is the same for all files."""
REFRESH_SECONDS = 10.0
"""A file that is not full is written all the same when this has passed."""
REFRESH_SHARE = 1 / 400
"""Of the time, at most, goes into files that are not full: large ones are written less often."""


class MonitorFile:
    """The file of a rank that is being filled.

    Example::

        file = MonitorFile(every=1)
        file.add(rows, Figures(0, floats, counts))
        file.write(directory, identity)
    """

    def __init__(self, every: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self._every, self._now = every, now
        self._runs: list[tuple[list[Row], list[Figures]]] = []
        self._first = self._last = -1
        self._rows = self._unwritten = 0
        self._written_bytes = 0
        self._written_at, self._took = now(), 0.0
        self.told: Callable[[int, int, int], None] | None = None
        """`told(bytes, steps, first)`: called once, with the first file that is worth measuring."""

    def add(self, rows: list[Row], figures: Figures) -> None:
        """Take a step. Ask `full` first."""
        if self._first < 0:
            steps = max(1, min(MOST_STEPS, MOST_ROWS // max(1, len(rows))))
            self._first, self._last = figures.step, figures.step + steps * self._every - 1
            self._written_at = self._now()
        if not self._runs or self._runs[-1][0] is not rows:
            self._runs.append((rows, []))
        self._runs[-1][1].append(figures)
        self._rows += len(rows)
        self._unwritten += 1

    def full(self, coming: int) -> bool:
        """Whether the step ``coming`` belongs into another file."""
        return self._first >= 0 and (not self._first <= coming <= self._last or self._rows >= 2 * MOST_ROWS)

    def due(self) -> bool:
        """Whether a file that is not full should be seen."""
        pause = max(REFRESH_SECONDS, self._took / REFRESH_SHARE)
        return self._unwritten > 0 and self._now() - self._written_at >= pause

    def write(self, directory: RunDirectory, identity: Mapping[str, int], *, full: bool = False) -> int:
        """Write the file as it is now; returns by how much it has grown."""
        if not self._unwritten:
            return 0
        began = time.thread_time()
        table = pa.concat_tables([steps_table(rows, steps, identity) for rows, steps in self._runs])
        path = f"monitor/rank_{identity['rank']:05d}/steps_{self._first:06d}_{self._last:06d}.parquet"
        size = directory.write_table(path, table)
        del table
        pa.default_memory_pool().release_unused()  # a training job has better use for it until the next file
        grown, self._written_bytes = size - self._written_bytes, size
        self._unwritten, self._written_at, self._took = 0, self._now(), time.thread_time() - began
        steps = sum(len(figures) for _, figures in self._runs)
        if self.told is not None and (steps >= ENOUGH_STEPS or full):
            self.told(size, steps, self._first)
            self.told = None
        return max(0, grown)

    def close(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Write what is left and begin another file."""
        grown = self.write(directory, identity, full=True)
        self._runs, self._first, self._last = [], -1, -1
        self._rows = self._unwritten = self._written_bytes = 0
        return grown


@dataclass
class MonitorBatch:
    """The rows of one watched step. The list of rows is shared with other steps and never changed.

    ``values`` are numbers that the host knew at once, by slot; ``ratios`` are slots whose value is the norm of a second
    slot over that of a third.

    Example::

        writer.submit(MonitorBatch(10, rows, table.seal(), file, job.watchers, job.fault))
    """

    step: int
    rows: list[Row]
    slots: SealedSlots
    file: MonitorFile
    watchers: Sequence[Watcher] = ()
    fault: Callable[[BaseException, str], None] | None = None
    values: Sequence[tuple[int, float]] = ()
    ratios: Sequence[tuple[int, int, int]] = ()
    summed: dict[int, tuple[list[Row], Summed]] | None = field(default=None, repr=False)
    """Given when microbatches are to be summed: the plans made so far, by the identity of their rows."""

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that the batch holds while it waits; most of its rows are those of other steps."""
        return self.slots.nbytes + ROW_BYTES

    def coming(self, last: int) -> int:
        """What the last step wrote: nothing, unless it filled a file."""
        return last

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Tell the watchers and join the file; write it if it is full or due."""
        floats, counts = self._arrived()
        numbered = self.slots.numbered()
        digests = None if numbered is None else numbered[0]
        rows = self.rows
        if self.summed is not None:
            rows, floats, counts, digests = self._summed(floats, counts, digests)
        for watcher in self.watchers:
            try:
                watcher.saw(StepRows(self.step, rows, floats, counts, digests))
            except Exception as error:
                if self.fault is None:
                    raise
                self.fault(error, type(watcher).__name__)
        size = self.file.close(directory, identity) if self.file.full(self.step) else 0
        self.file.add(rows, Figures(self.step, floats, counts, digests))
        return size + (self.file.write(directory, identity) if self.file.due() else 0)

    def _arrived(self) -> tuple[Floats, Counts]:
        floats, counts = self.slots.wait()
        if not counts.flags.writeable:
            counts = counts.copy()
        for slot, value in self.values:
            _put(floats, counts, slot, value)
        for slot, above, below in self.ratios:
            if floats[below, 3] > 0:
                _put(floats, counts, slot, math.sqrt(floats[above, 3] / floats[below, 3]))
        return floats, counts

    def _summed(
        self, floats: Floats, counts: Counts, digests: np.ndarray[tuple[int], np.dtype[np.uint64]] | None
    ) -> tuple[list[Row], Floats, Counts, np.ndarray[tuple[int], np.dtype[np.uint64]] | None]:
        plans = self.summed if self.summed is not None else {}
        found = plans.get(id(self.rows))
        if found is None:
            plans.clear()
            found = plans[id(self.rows)] = (self.rows, Summed(self.rows))
        plan = found[1]
        if digests is not None:
            digests = plan.digests(digests)
        return plan.rows, *plan.figures(floats, counts), digests

    def count(self, counts: WriterCounts) -> None:
        """One more step."""
        counts.steps_written += 1
        counts.rows_written += len(self.rows)

    def drop(self, counts: WriterCounts) -> None:
        """One step lost."""
        counts.steps_dropped += 1
        counts.rows_dropped += len(self.rows)


@dataclass(frozen=True)
class MonitorBatches:
    """Several steps that are handed over together: waking the writer costs more than a short step has to give.

    Example::

        writer.submit(MonitorBatches([first, second]))
    """

    batches: Sequence[MonitorBatch]

    @property
    def step(self) -> int:
        """The last of its steps."""
        return self.batches[-1].step

    @property
    def nbytes(self) -> int:
        """What all of them hold."""
        return sum(batch.nbytes for batch in self.batches)

    def coming(self, last: int) -> int:
        """As many bytes as the last ones wrote."""
        return last

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """One after the other."""
        return sum(batch.write(directory, identity) for batch in self.batches)

    def count(self, counts: WriterCounts) -> None:
        """So many steps more."""
        for batch in self.batches:
            batch.count(counts)

    def drop(self, counts: WriterCounts) -> None:
        """So many steps lost."""
        for batch in self.batches:
            batch.drop(counts)


@dataclass(frozen=True)
class MonitorEnd:
    """Writes the file that is being filled; the last batch of a monitor."""

    step: int
    file: MonitorFile
    nbytes: int = ROW_BYTES

    def coming(self, last: int) -> int:
        """A limit that is reached must not keep the last steps from being written."""
        return 0

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Write what is left."""
        return self.file.close(directory, identity)

    def count(self, counts: WriterCounts) -> None:
        """Its steps were counted when they came."""

    def drop(self, counts: WriterCounts) -> None:
        """Its steps were counted when they came."""


def _put(floats: Floats, counts: Counts, slot: int, value: float) -> None:
    finite = math.isfinite(value)
    floats[slot] = (value, value, value, value * value, abs(value)) if finite else (np.inf, -np.inf, 0, 0, -np.inf)
    counts[slot] = (math.isnan(value), value == math.inf, value == -math.inf, value == 0)
