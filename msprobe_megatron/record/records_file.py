"""`records.parquet` of step after step: where only figures differ from the last step, only figures are written anew.

Runs in the writer thread. Most of the time that a small Parquet file takes goes into describing its columns. Columns of
figures are stored plain, as the last bytes of their part of the file; once two steps had the same rows, the bytes of
the last file are kept and the figures of the next step put into their places. The file is the very same that would
have been made in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from msprobe_megatron.record.schema import FLOAT_COLUMNS, Row, arrow_schema
from msprobe_megatron.record.sightings import Sighting
from msprobe_megatron.record.table import Columns, figures_of, table_of

_MANY_ROWS = 5000
_CHANGING = (*FLOAT_COLUMNS, "n_zero", "digest")
"""Stored as they are; counts of NaN and Inf, which are nearly always zero, are compressed and expected to stay."""
_SCHEMA = arrow_schema()
_TEXT = [f.name for f in _SCHEMA if pa.types.is_dictionary(f.type) or pa.types.is_string(f.type)]

_Masks = Mapping[str, npt.NDArray[np.bool_]]


class RecordsFile:
    """Makes the files of a run's steps; remembers the last.

    Example::

        file = RecordsFile()
        content = file.content(10, rows, sealed.wait(), None, identity, complete=True)
        directory.write_table("step_000010/rank_00003/records.parquet", content)
    """

    def __init__(self) -> None:
        self._columns = Columns()
        self._same: dict[str, pa.Array] | None = None
        self._complete = True
        self._bytes = bytearray()
        self._places: dict[str, tuple[int, int]] = {}
        self._masks: dict[str, bytes] = {}
        self._steady: dict[str, bytes] = {}

    def content(
        self,
        step: int,
        rows: Sequence[Sighting | Row],
        figures: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]],
        numbered: tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]] | None,
        identity: Mapping[str, int],
        complete: bool,
    ) -> pa.Table | memoryview:
        """The table of a step, or its file; a file is good until the next call."""
        if not rows:
            return _marked(_SCHEMA.empty_table(), complete)
        same, slot = self._columns.of(rows, identity)
        columns, masks = figures_of(step, slot, *figures, numbered)
        again = same is self._same and complete == self._complete
        if again and self._put(columns, masks):
            return memoryview(self._bytes)
        table = _marked(table_of(same, columns, masks), complete)
        self._same, self._complete, self._places = same, complete, {}
        if len(rows) > _MANY_ROWS or "sketch" in columns:
            return table
        content = encoded(table)
        if again:
            self._learn(content, columns, masks)
        return content

    def _put(self, columns: Mapping[str, Any], masks: _Masks) -> bool:
        """Put the figures into the last file; False, with nothing done, where more than figures has changed."""
        if (
            not self._places
            or any(columns[name].tobytes() != values for name, values in self._steady.items())
            or any(mask.tobytes() != self._masks[name] for name, mask in masks.items())
        ):
            return False
        for name, (first, last) in self._places.items():
            self._bytes[first:last] = _stored(name, columns, masks, last - first)
        return True

    def _learn(self, content: memoryview, columns: Mapping[str, Any], masks: _Masks) -> None:
        """Find the figures in a file; where one of them is not as expected, every file is made in full."""
        found: dict[str, tuple[int, int]] = {}
        group = pq.read_metadata(pa.BufferReader(content)).row_group(0)
        for index, field in enumerate(_leaves(_SCHEMA)):
            chunk = group.column(index)
            if field not in columns or (field != "step" and field not in _CHANGING):
                continue
            first = chunk.data_page_offset
            end = first if field == "step" else first + chunk.total_compressed_size
            values = _stored(field, columns, masks, 0)
            if content[end - len(values) : end] != values:
                return
            found[field] = (end - len(values), end)
        self._bytes, self._places = bytearray(content), found
        self._masks = {name: mask.tobytes() for name, mask in masks.items()}
        self._steady = {name: values.tobytes() for name, values in columns.items() if name not in found}


def encoded(table: pa.Table) -> memoryview:
    """A small table as a Parquet file, with the columns that change stored as they are.

    Example::

        pq.read_table(pa.BufferReader(encoded(table)))
    """
    # In memory first: into a file, every page of every column is a call of its own.
    stream = pa.BufferOutputStream()
    pq.write_table(
        table,
        stream,
        compression={leaf: "snappy" for leaf in _leaves(table.schema) if leaf != "step" and leaf not in _CHANGING},
        write_statistics=False,
        use_dictionary=[*_TEXT, "step"],
    )
    return memoryview(stream.getvalue()).cast("B")


def _stored(name: str, columns: Mapping[str, Any], masks: _Masks, size: int) -> bytes:
    """The bytes of a column in the file: without the nulls, and of the step, which all rows share, a single one.

    ``size`` is how many they are, if that is known: where they are all there are, no null has to be looked for.
    """
    values: npt.NDArray[Any] = columns[name]
    mask = masks.get(name)
    if name == "step":
        values = values[:1]
    return (values if mask is None or values.nbytes == size else values[~mask]).tobytes()


def _leaves(schema: pa.Schema) -> list[str]:
    """Names of the columns as Parquet has them; a list is a column of its elements."""
    return [f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in schema]


def _marked(table: pa.Table, complete: bool) -> pa.Table:
    metadata = {**(table.schema.metadata or {}), b"complete": b"true" if complete else b"false"}
    return table.replace_schema_metadata(metadata)
