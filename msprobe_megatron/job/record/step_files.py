"""The files of one recorded step of one rank: `records.parquet` and the `sites.json` that its rows point to.

Runs in the writer thread. Steps of a training resemble each other, so each of the two remembers the last step: columns
that hold no statistics are built once for steps with equal rows, statistics are then put into the bytes of the last
Parquet file, and a `sites.json` that repeats is a hard link. At 5,000 rows a step these save 3.4, 1.5 and 6.2 ms of
some 13 ms of the writer's CPU time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from msprobe_megatron.job.record.observations import Observation, Observations, cells_of, rows_of
from msprobe_megatron.job.record.slots import SealedSlots
from msprobe_megatron.job.record.writer import ROW_BYTES, StepRowsBatch
from msprobe_megatron.run_directory.directory import RunDirectory, put
from msprobe_megatron.run_directory.safe_files import json_text
from msprobe_megatron.run_directory.schema import FLOAT_COLUMNS, Row, arrow_schema
from msprobe_megatron.run_directory.table import columns_of, statistics_of, table_of

_MANY_ROWS = 5000
"""Steps of more rows are compressed, and so never patched."""
_MOST_ROWS_KEPT = 100_000
"""Keeping the rows of a larger step would cost more memory than rebuilding its columns costs time."""
_PLAIN = (*FLOAT_COLUMNS, "n_zero", "digest")
"""Columns stored uncompressed. Counts of NaN and Inf, nearly always zero, are compressed and expected to stay."""
_SCHEMA = arrow_schema()
_TEXT = [f.name for f in _SCHEMA if pa.types.is_dictionary(f.type) or pa.types.is_string(f.type)]

_Masks = Mapping[str, npt.NDArray[np.bool_]]


class RecordsFile:
    """Builds `records.parquet` of step after step; remembers the columns and the bytes of the last one."""

    def __init__(self) -> None:
        self._rows: Sequence[Observation | Row] | None = None
        self._identity: Mapping[str, int] = {}
        self._columns: dict[str, pa.Array] = {}
        self._slot: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._complete: bool | None = None
        self._bytes = bytearray()
        self._ranges: dict[str, tuple[int, int]] = {}
        self._masks: dict[str, bytes] = {}
        self._steady: dict[str, bytes] = {}

    def content(
        self,
        step: int,
        rows: Sequence[Observation | Row],
        stats: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]],
        numbered: tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]] | None,
        identity: Mapping[str, int],
        complete: bool,
    ) -> pa.Table | memoryview:
        """Return the table of a step, or its Parquet file as bytes, which are valid until the next call."""
        if not rows:
            return _marked(_SCHEMA.empty_table(), complete)
        same_rows = self._same_rows(rows, identity)
        columns, masks = statistics_of(step, self._slot, *stats, numbered)
        repeats = same_rows and complete == self._complete
        if repeats and self._patch(columns, masks):
            return memoryview(self._bytes)
        table = _marked(table_of(self._columns, columns, masks), complete)
        self._complete, self._ranges = complete, {}
        if len(rows) > _MANY_ROWS or "sketch" in columns:
            return table
        content = encoded(table)
        if repeats:
            self._learn(content, columns, masks)
        return content

    def _same_rows(self, rows: Sequence[Observation | Row], identity: Mapping[str, int]) -> bool:
        """True if the columns of the last step serve this one too; otherwise they are rebuilt."""
        if self._rows is not None and rows == self._rows and identity == self._identity:
            return True
        self._columns, self._slot = columns_of(cells_of(rows), identity)
        self._rows, self._identity = rows if len(rows) <= _MOST_ROWS_KEPT else None, dict(identity)
        return False

    def _patch(self, columns: Mapping[str, Any], masks: _Masks) -> bool:
        """Put the statistics into the last file; False, with nothing changed, if more than statistics differs."""
        if (
            not self._ranges
            or any(columns[name].tobytes() != values for name, values in self._steady.items())
            or any(mask.tobytes() != self._masks[name] for name, mask in masks.items())
        ):
            return False
        for name, (first, last) in self._ranges.items():
            self._bytes[first:last] = _stored(name, columns, masks, last - first)
        return True

    def _learn(self, content: memoryview, columns: Mapping[str, Any], masks: _Masks) -> None:
        """Locate the statistics in a file; if one column is not where expected, later files are built in full."""
        found: dict[str, tuple[int, int]] = {}
        group = pq.read_metadata(pa.BufferReader(content)).row_group(0)
        for index, field_name in enumerate(_leaves(_SCHEMA)):
            chunk = group.column(index)
            if field_name not in columns or (field_name != "step" and field_name not in _PLAIN):
                continue
            first = chunk.data_page_offset
            end = first if field_name == "step" else first + chunk.total_compressed_size
            values = _stored(field_name, columns, masks, 0)
            if content[end - len(values) : end] != values:
                return
            found[field_name] = (end - len(values), end)
        self._bytes, self._ranges = bytearray(content), found
        self._masks = {name: mask.tobytes() for name, mask in masks.items()}
        self._steady = {name: values.tobytes() for name, values in columns.items() if name not in found}


def encoded(table: pa.Table) -> memoryview:
    """Return a small table as a Parquet file in which the columns of statistics are uncompressed."""
    # In memory first: into a file, every page of every column is a call of its own.
    stream = pa.BufferOutputStream()
    pq.write_table(
        table,
        stream,
        compression={leaf: "snappy" for leaf in _leaves(table.schema) if leaf != "step" and leaf not in _PLAIN},
        write_statistics=False,
        use_dictionary=[*_TEXT, "step"],
    )
    return memoryview(stream.getvalue()).cast("B")


def _stored(name: str, columns: Mapping[str, Any], masks: _Masks, size: int) -> bytes:
    """The bytes of a column in the file: nulls left out; of the step, which all rows share, a single value.

    ``size`` is their number, if known: when it is that of all values, there are no nulls to look for.
    """
    values: npt.NDArray[Any] = columns[name]
    mask = masks.get(name)
    if name == "step":
        values = values[:1]
    return (values if mask is None or values.nbytes == size else values[~mask]).tobytes()


def _leaves(schema: pa.Schema) -> list[str]:
    """Column names as Parquet spells them; a list is a column of its elements."""
    return [f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in schema]


def _marked(table: pa.Table, complete: bool) -> pa.Table:
    metadata = {**(table.schema.metadata or {}), b"complete": b"true" if complete else b"false"}
    return table.replace_schema_metadata(metadata)


class SitesFile:
    """Writes `sites.json` of step after step; a hard link where the sites are the very objects of the last step."""

    def __init__(self) -> None:
        self._last: dict[str, Any] | None = None
        self._path = ""

    def write(self, directory: RunDirectory, sites: Mapping[str, Any], path: str) -> int:
        """Write the sites as JSON, or link to the file that has them; returns the disk space taken."""
        last = self._last
        same = last is not None and last.keys() == sites.keys() and all(last[key] is sites[key] for key in sites)
        if same and directory.repeat_file(self._path, path, synced=False) is not None:
            return 0
        text = ",\n ".join(f"{json_text(key)}: {json_text(value)}" for key, value in sites.items())
        size = directory.write_file(path, lambda file: put(file, f"{{{text}}}".encode("ascii")))
        self._last, self._path = dict(sites), path
        return size


@dataclass(frozen=True)
class StepBatch(StepRowsBatch):
    """Everything one rank observed in one step. ``complete`` is False when the step was cut short."""

    step: int
    rows: Sequence[Observation | Row]
    slots: SealedSlots
    sites: dict[str, Any]
    complete: bool
    only_nonfinite: bool = False
    sites_file: SitesFile = field(default_factory=SitesFile, compare=False)
    records_file: RecordsFile = field(default_factory=RecordsFile, compare=False)
    hashes: Mapping[int, str] = field(default_factory=dict, compare=False)
    """JSON objects by slot that belong into `extra`; complete when the batch is written."""

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that the batch holds while it is queued."""
        return self.slots.nbytes + ROW_BYTES * (1 + len(self.rows) + len(self.sites))

    @property
    def row_count(self) -> int:
        """How many rows it has."""
        return len(self.rows)

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Write the records of the step and the sites they point to."""
        folder = f"step_{self.step:06d}/rank_{identity['rank']:05d}"
        stats = self.slots.wait()
        if self.hashes and isinstance(self.rows, Observations):
            self.rows.join_extra(self.hashes)
        rows = nonfinite_origin(rows_of(self.rows), stats[1]) if self.only_nonfinite else self.rows
        table = self.records_file.content(
            self.step, rows, stats, self.slots.numbered(), identity, complete=self.complete
        )
        # Sites first: a reader that sees records then also finds what they point to.
        size = self.sites_file.write(directory, self.sites, f"{folder}/sites.json")
        return size + directory.write_table(f"{folder}/records.parquet", table)


def nonfinite_origin(rows: Sequence[Row], counts: npt.NDArray[np.int64]) -> list[Row]:
    """The rows of the first call that shows a NaN or an Inf, inputs included; empty if there is none.

    Rows of one call share name, kind, phase, microbatch and virtual stage. For `task: nonfinite`.
    """
    bad = np.asarray((counts[:, :3] > 0).any(axis=1))
    first = next((row for row in rows if row.slot >= 0 and bad[row.slot]), None)
    if first is None:
        return []
    return [row for row in rows if _call(row) == _call(first)]


def _call(row: Row) -> tuple[object, ...]:
    return row.name, row.kind, row.phase, row.microbatch, row.vpp
