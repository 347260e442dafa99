"""The monitor's files, ``monitor/rank_00003/steps_000000_000099.parquet``: many watched steps of one rank in each.

Runs in the writer thread. A batch is one step: its statistics arrive on the host, the watchers of the job (alerts, live
curves) see them, and the step joins the file that is being filled. A file is written when its range of steps is full,
replaced as a whole every few seconds before that so that a running job can be watched, and at the end of the run.
Steps that observe the same things share one list of rows: what follows from the rows alone is built once for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet  # noqa: F401 (loaded with the kit and not with the first file, in the middle of a step)

from msprobe_megatron.job.record.slots import SealedSlots
from msprobe_megatron.job.record.writer import ROW_BYTES, Batch, StepRowsBatch, WriterCounts
from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.run_directory.safe_files import OverAllowance
from msprobe_megatron.run_directory.schema import COUNT_COLUMNS, FLOAT_COLUMNS, Row
from msprobe_megatron.run_directory.table import build_table

MOST_STEPS = 100
"""Watched steps per file."""
MOST_ROWS = 20_000
"""Rows per file; a row that is not written yet takes 72 bytes."""
ENOUGH_STEPS = 10
"""A file of fewer steps says little about the size of a step: most of it is the same for all files."""
REFRESH_SECONDS = 10.0
"""An incomplete file is rewritten after this time."""
REFRESH_SHARE = 1 / 400
"""Share of the time, at most, that goes into incomplete files: large ones are rewritten less often."""
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
_T = TypeVar("_T")


class StepRows(NamedTuple):
    """The monitor's rows of one step with their statistics.

    ``row.slot`` is the line of a row in the arrays, -1 for a row without statistics. Steps that observe the same things
    share one list of rows (`PerRows`).
    """

    step: int
    rows: list[Row]
    floats: Floats
    """(slots, 5): min, max, sum, sumsq, absmax over the finite elements; NaN where nothing was measured."""
    counts: Counts
    """(slots, 4): NaN, +Inf, -Inf, zeros; -1 where nothing was measured."""
    digests: Digests | None = None
    """(slots,): digests of rows of kind ``data``, if the monitor takes any."""


class Watcher(Protocol):
    """Sees every watched step one copy after its end. Training never waits for a watcher."""

    def saw(self, rows: StepRows) -> None:
        """A watched step is over. Runs in the writer thread; an exception disarms the session as a fault."""


class PerRows(Generic[_T]):
    """Caches what is derived from a list of rows as long as the next steps share the list.

    Example::

        >>> count = PerRows(len)
        >>> count([]), count([])
        (0, 0)
    """

    def __init__(self, derive: Callable[[list[Row]], _T]) -> None:
        self._derive = derive
        self._last: tuple[list[Row], _T] | None = None

    def __call__(self, rows: list[Row]) -> _T:
        """Return what follows from ``rows``, derived anew if it is another list than last time."""
        if self._last is None or self._last[0] is not rows:
            self._last = (rows, self._derive(rows))
        return self._last[1]


class MonitorFile:
    """The file of a rank that is being filled."""

    def __init__(self, every: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self._every, self._now = every, now
        self._runs: list[list[StepRows]] = []
        """Steps that follow each other and share their rows, together."""
        self._first = self._last = -1
        self._rows = self._unwritten = 0
        self._written_bytes = 0
        self._written_at, self._took = now(), 0.0
        self.on_first_file: Callable[[int, int, int], None] | None = None
        """`on_first_file(bytes, steps, first)`: called once, with the first file that is worth measuring."""

    def add(self, step: StepRows) -> None:
        """Add a step. Check `full` first."""
        if self._first < 0:
            steps = max(1, min(MOST_STEPS, MOST_ROWS // max(1, len(step.rows))))
            self._first, self._last = step.step, step.step + steps * self._every - 1
            self._written_at = self._now()
        if not self._runs or self._runs[-1][0].rows is not step.rows:
            self._runs.append([])
        self._runs[-1].append(step)
        self._rows += len(step.rows)
        self._unwritten += 1

    def full(self, step: int) -> bool:
        """True if ``step`` belongs to the next file."""
        return self._first >= 0 and (not self._first <= step <= self._last or self._rows >= 2 * MOST_ROWS)

    def due(self) -> bool:
        """True if an incomplete file should be written for readers of the running job."""
        pause = max(REFRESH_SECONDS, self._took / REFRESH_SHARE)
        return self._unwritten > 0 and self._now() - self._written_at >= pause

    def write(self, directory: RunDirectory, identity: Mapping[str, int], *, full: bool = False) -> int:
        """Write the file as it is now; returns by how many bytes it has grown."""
        if not self._unwritten:
            return 0
        began = time.thread_time()
        table = pa.concat_tables([steps_table(steps, identity) for steps in self._runs])
        path = f"monitor/rank_{identity['rank']:05d}/steps_{self._first:06d}_{self._last:06d}.parquet"
        size = directory.write_table(path, table)
        del table
        pa.default_memory_pool().release_unused()  # a training job has better use for it until the next file
        grown, self._written_bytes = size - self._written_bytes, size
        self._unwritten, self._written_at, self._took = 0, self._now(), time.thread_time() - began
        count = sum(map(len, self._runs))
        if self.on_first_file is not None and (count >= ENOUGH_STEPS or full):
            self.on_first_file(size, count, self._first)
            self.on_first_file = None
        return max(0, grown)

    def close(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Write what is left and start another file."""
        grown = self.write(directory, identity, full=True)
        self.forget()
        return grown

    def forget(self) -> None:
        """Start another file; what was not written is lost."""
        self._runs, self._first, self._last = [], -1, -1
        self._rows = self._unwritten = self._written_bytes = 0


def steps_table(steps: Sequence[StepRows], identity: Mapping[str, int]) -> pa.Table:
    """One table of all ``steps``, which share their rows, in the columns of `run_directory.schema`."""
    rows = steps[0].rows
    slot = np.array([row.slot for row in rows], np.int64)
    slots = slot.max(initial=-1) + 1
    blank = np.full((slots, len(FLOAT_COLUMNS)), np.nan), np.full((slots, len(COUNT_COLUMNS)), -1)
    table = pa.concat_tables([build_table(0, rows, *blank, identity)] * len(steps))
    floats = np.concatenate([_at(step.floats, slot, np.nan) for step in steps])
    counts = np.concatenate([_at(step.counts, slot, -1) for step in steps])
    columns = {"step": pa.array(np.repeat([step.step for step in steps], len(rows)), pa.int64())}
    for index, name in enumerate(FLOAT_COLUMNS):
        column = np.ascontiguousarray(floats[:, index])
        columns[name] = pa.array(column, pa.float64(), mask=~np.isfinite(column))
    for index, name in enumerate(COUNT_COLUMNS):
        column = np.ascontiguousarray(counts[:, index])
        columns[name] = pa.array(column, pa.int64(), mask=column < 0)
    if steps[0].digests is not None:
        digests = np.concatenate([_at(step.digests, slot, 0) for step in steps if step.digests is not None])
        absent = np.tile([row.kind != "data" or row.slot < 0 for row in rows], len(steps))
        columns["digest"] = pa.array(digests, pa.uint64(), mask=absent)
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
    return table


def _at(lines: npt.NDArray[np.generic], slot: npt.NDArray[np.int64], absent: float) -> npt.NDArray[np.generic]:
    """The lines of the slots; slot -1 is a line of absent values."""
    last = np.full((1, *lines.shape[1:]), absent, lines.dtype)
    return np.concatenate((lines, last))[slot]


class MicrobatchSum:
    """Combines the rows of all microbatches of a step into one row: sums add, extremes combine, element counts add."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows: list[Row] = []
        self._slots: list[int] = []
        self._lines: list[int] = []
        found: dict[tuple[object, ...], int] = {}
        for row in rows:
            key = (row.phase, row.vpp, row.kind, row.name, row.io, row.path, row.dtype, row.extra)
            line = None if row.microbatch is None or row.kind == "data" else found.get(key)
            if line is None:
                line = len(self.rows)
                if row.microbatch is not None and row.kind != "data":
                    found[key] = line
                    row = row._replace(microbatch=None)  # noqa: PLW2901
                self.rows.append(row._replace(seq=line, slot=line if row.slot >= 0 else -1))
            else:
                self.rows[line] = self.rows[line]._replace(numel=self.rows[line].numel + row.numel)
            if row.slot >= 0:
                self._slots.append(row.slot)
                self._lines.append(line)

    def of(self, step: StepRows) -> StepRows:
        """The step with one row for all microbatches."""
        slots, lines, number = np.array(self._slots, np.int64), np.array(self._lines, np.int64), len(self.rows)
        floats, counts = np.full((number, 5), np.nan), np.full((number, 4), -1, np.int64)
        order = np.argsort(lines, kind="stable")
        if len(order):
            edges = np.flatnonzero(np.diff(lines[order], prepend=-1))
            targets, sources = lines[order][edges], slots[order]
            for column, reduce in enumerate((np.fmin, np.fmax, np.add, np.add, np.fmax)):
                floats[targets, column] = reduce.reduceat(step.floats[sources, column], edges)
            counts[targets] = np.add.reduceat(step.counts[sources], edges, axis=0)
            counts[counts < 0] = -1
        digests = None
        if step.digests is not None:  # rows that have one are never combined
            digests = np.zeros(number, np.uint64)
            digests[lines] = step.digests[slots]
        return StepRows(step.step, self.rows, floats, counts, digests)


@dataclass
class MonitorBatch(StepRowsBatch):
    """The rows of one watched step. The list of rows is shared with other steps and never changed.

    ``values`` are numbers that the host knew at once, by slot; ``ratios`` are slots whose value is the norm of a second
    slot over that of a third.
    """

    step: int
    rows: list[Row]
    slots: SealedSlots
    file: MonitorFile
    watchers: Sequence[Watcher] = ()
    fault: Callable[[BaseException, str], None] | None = None
    values: Sequence[tuple[int, float]] = ()
    ratios: Sequence[tuple[int, int, int]] = ()
    summed: PerRows[MicrobatchSum] | None = field(default=None, repr=False)
    """Given when microbatches are to be summed."""

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that the batch holds while it is queued; most of its rows are those of other steps."""
        return self.slots.nbytes + ROW_BYTES

    @property
    def row_count(self) -> int:
        """How many rows it has."""
        return len(self.rows)

    def expected_bytes(self, last: int) -> int:
        """None: alerts see the step even when its rows have no room on the disk any more."""
        return 0

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Show the step to the watchers and add it to the file; write the file if it is full or due."""
        step = self._arrived()
        if self.summed is not None:
            step = self.summed(self.rows).of(step)
        for watcher in self.watchers:
            try:
                watcher.saw(step)
            except Exception as error:
                if self.fault is None:
                    raise
                self.fault(error, type(watcher).__name__)
        try:
            size = self.file.close(directory, identity) if self.file.full(self.step) else 0
        except OverAllowance:
            self.file.forget()
            raise
        self.file.add(step)
        return size + (self.file.write(directory, identity) if self.file.due() else 0)

    def _arrived(self) -> StepRows:
        """Wait for the statistics of the step; fill in what the host knew and the ratios."""
        floats, counts = self.slots.wait()
        if not counts.flags.writeable:
            counts = counts.copy()
        for slot, value in self.values:
            _put(floats, counts, slot, value)
        for slot, above, below in self.ratios:
            if floats[below, 3] > 0:
                _put(floats, counts, slot, math.sqrt(floats[above, 3] / floats[below, 3]))
        numbered = self.slots.numbered()
        return StepRows(self.step, self.rows, floats, counts, None if numbered is None else numbered[0])


def _put(floats: Floats, counts: Counts, slot: int, value: float) -> None:
    finite = math.isfinite(value)
    floats[slot] = (value, value, value, value * value, abs(value)) if finite else (np.inf, -np.inf, 0, 0, -np.inf)
    counts[slot] = (math.isnan(value), value == math.inf, value == -math.inf, value == 0)


@dataclass(frozen=True)
class MonitorBatches(Batch):
    """Several short steps submitted together: waking the writer for each would cost more than it saves."""

    batches: Sequence[MonitorBatch]
    lost: list[MonitorBatch] = field(default_factory=list, compare=False)
    """Those that had no room on the disk."""

    @property
    def nbytes(self) -> int:
        """What all of them hold."""
        return sum(batch.nbytes for batch in self.batches)

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Write one after the other; one that has no room on the disk does not keep the next from its watchers."""
        size = 0
        for batch in self.batches:
            try:
                size += batch.write(directory, identity)
            except OverAllowance:
                self.lost.append(batch)
        return size

    def count(self, counts: WriterCounts) -> None:
        """Add all steps, those without room as lost."""
        for batch in self.batches:
            if any(batch is one for one in self.lost):
                batch.drop(counts)
            else:
                batch.count(counts)

    def drop(self, counts: WriterCounts) -> None:
        """Add all steps as lost."""
        for batch in self.batches:
            batch.drop(counts)


@dataclass(frozen=True)
class MonitorEnd(Batch):
    """The last batch of a monitor: writes the file that is being filled, even when the disk limit is reached."""

    file: MonitorFile

    @property
    def nbytes(self) -> int:
        """A small constant: what it writes was counted with its steps."""
        return ROW_BYTES

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Write what is left."""
        return self.file.close(directory, identity)
