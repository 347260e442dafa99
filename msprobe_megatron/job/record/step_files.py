"""What the writer thread is handed: batches that know how to write themselves, and how they count.

A probe fills a batch and lets go of it; the writer knows none of their kinds. A new kind of file is a new batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeGuard

from msprobe_megatron.record.directory import RunDirectory, put
from msprobe_megatron.record.json_text import json_text
from msprobe_megatron.record.nonfinite import origin
from msprobe_megatron.record.records_file import RecordsFile
from msprobe_megatron.record.safe_files import Unfinished
from msprobe_megatron.record.schema import Row
from msprobe_megatron.record.sightings import Sighting, rows_of
from msprobe_megatron.record.slots import SealedSlots

ROW_BYTES = 512
"""Memory of a waiting row: the tuple, its numbers and its shape; names are shared between rows."""


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


class Batch(Protocol):
    """Something that waits in the writer's queue and is then written, or dropped and counted.

    All but ``nbytes`` runs in the writer thread. ``count`` and ``drop`` leave ``bytes_*`` to the writer.
    """

    @property
    def step(self) -> int:
        """The step it is of."""

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that it holds while it waits."""

    def coming(self, last: int) -> int:
        """How many bytes its files will have, where the last of its kind had ``last``; held against the disk limit."""

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Write the files; returns their size. ``identity`` is the place of this process, as in every row."""

    def count(self, counts: WriterCounts) -> None:
        """It was written."""

    def drop(self, counts: WriterCounts) -> None:
        """It was dropped."""


class LargeBatch(Batch, Protocol):
    """A batch of one file so large that the disk is best given several of them at once."""

    def begin(self, directory: RunDirectory, identity: Mapping[str, int]) -> Unfinished:
        """Write the file but for its way to the disk."""


def is_large(batch: Batch) -> TypeGuard[LargeBatch]:
    """Whether a batch can be begun and finished together with others.

    Example: ``is_large(TensorPack(step=3, number=0))``.
    """
    return hasattr(batch, "begin")


class SitesFile:
    """``sites.json`` of step after step: those of most steps are the very objects of the step before, and so is the
    file, by a second name.
    """

    def __init__(self) -> None:
        self._last: dict[str, Any] | None = None
        self._path = ""

    def write(self, directory: RunDirectory, sites: Mapping[str, Any], path: str) -> int:
        """Write the sites as JSON, or link to the file that has them already; returns what it takes on the disk."""
        last = self._last
        same = last is not None and last.keys() == sites.keys() and all(last[key] is sites[key] for key in sites)
        if same and directory.repeat_file(self._path, path, synced=False) is not None:
            return 0
        text = ",\n ".join(f"{json_text(key)}: {json_text(value)}" for key, value in sites.items())
        size = directory.write_file(path, lambda file: put(file, f"{{{text}}}".encode("ascii")))
        self._last, self._path = dict(sites), path
        return size


@dataclass(frozen=True)
class StepBatch:
    """All that one rank saw of one step. ``complete`` is False when the step was cut short.

    Example::

        writer.submit(StepBatch(10, rows, table.seal(), sites, complete=True))
    """

    step: int
    rows: Sequence[Sighting | Row]
    slots: SealedSlots
    sites: dict[str, Any]
    complete: bool
    only_nonfinite: bool = False
    sites_file: SitesFile = field(default_factory=SitesFile, compare=False)
    records_file: RecordsFile = field(default_factory=RecordsFile, compare=False)

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that the batch holds while it waits."""
        return self.slots.nbytes + ROW_BYTES * (1 + len(self.rows) + len(self.sites))

    def coming(self, last: int) -> int:
        """The files of a step are taken to be as large as those of the last."""
        return last

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Write the records of the step and the sites they point to."""
        folder = f"step_{self.step:06d}/rank_{identity['rank']:05d}"
        figures = self.slots.wait()
        rows = origin(rows_of(self.rows), figures[1]) if self.only_nonfinite else self.rows
        table = self.records_file.content(
            self.step, rows, figures, self.slots.numbered(), identity, complete=self.complete
        )
        # Sites first: who sees records then also finds what they point to.
        size = self.sites_file.write(directory, self.sites, f"{folder}/sites.json")
        return size + directory.write_table(f"{folder}/records.parquet", table)

    def count(self, counts: WriterCounts) -> None:
        """One more step."""
        counts.steps_written += 1
        counts.rows_written += len(self.rows)

    def drop(self, counts: WriterCounts) -> None:
        """One step lost."""
        counts.steps_dropped += 1
        counts.rows_dropped += len(self.rows)
