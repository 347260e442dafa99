"""Rows and statistics of one step as an Arrow table.

Runs in the writer thread, which shares the interpreter with training: hence whole columns at a time, and no
Python code for each cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from msprobe_megatron.run_directory.schema import COUNT_COLUMNS, FLOAT_COLUMNS, IDENTITY_COLUMNS, Row, arrow_schema

_FROM_ROW = frozenset(Row._fields) - {"slot", "site"}
_SCHEMA = arrow_schema()


def build_table(
    step: int,
    rows: Sequence[Row],
    floats: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    identity: Mapping[str, int],
    numbered: tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]] | None = None,
) -> pa.Table:
    """Return the table of a step; statistics that are not finite, or whose slot was never filled, become null."""
    if not rows:
        return _SCHEMA.empty_table()
    cells = dict(zip(Row._fields, zip(*rows, strict=True), strict=True))
    same, slot = columns_of(cells, identity)
    return table_of(same, *statistics_of(step, slot, floats, counts, numbered))


def columns_of(
    cells: Mapping[str, Sequence[Any]], identity: Mapping[str, int]
) -> tuple[dict[str, pa.Array], npt.NDArray[np.int64]]:
    """The columns that hold no statistics, and the slot of each row; ``cells`` are the fields of `Row` by name."""
    columns: dict[str, Any] = {name: cells[name] for name in _FROM_ROW}
    count = len(cells["slot"])
    for name in IDENTITY_COLUMNS:
        columns[name] = np.full(count, identity[name], np.int32 if name == "rank" else np.int16)
    site = np.array(cells["site"], np.int32)
    columns["site"] = site
    masks = {"site": site < 0}
    arrays = {
        field.name: _column(columns[field.name], field.type, masks.get(field.name))
        for field in _SCHEMA
        if field.name in columns
    }
    return arrays, np.array(cells["slot"], np.int64)


def statistics_of(
    step: int,
    slot: npt.NDArray[np.int64],
    floats: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    numbered: tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]] | None = None,
) -> tuple[dict[str, Any], dict[str, npt.NDArray[np.bool_]]]:
    """The columns that change from step to step, and where they are null."""
    statistics: dict[str, Any] = {"step": np.full(len(slot), step, np.int64)}
    masks: dict[str, npt.NDArray[np.bool_]] = {}
    _add_statistics(statistics, masks, slot, floats, counts)
    if numbered is not None:
        _add_numbered(statistics, masks, slot, *numbered)
    return statistics, masks


def table_of(
    same: Mapping[str, pa.Array], statistics: Mapping[str, Any], masks: Mapping[str, npt.NDArray[np.bool_]]
) -> pa.Table:
    """All columns in their order."""
    arrays = [
        _column(statistics[field.name], field.type, masks.get(field.name))
        if field.name in statistics
        else same[field.name]
        for field in _SCHEMA
    ]
    return pa.table(arrays, schema=_SCHEMA)


def _add_statistics(
    columns: dict[str, Any],
    masks: dict[str, npt.NDArray[np.bool_]],
    slot: npt.NDArray[np.int64],
    floats: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
) -> None:
    if slot.max(initial=-1) >= len(floats):
        raise IndexError(f"slot {slot.max()} of a row is not among the {len(floats)} of its step")
    # One line more than there are slots, at -1, for the rows that have none. NaN and -1 mean absent.
    padded_floats = np.concatenate((floats, np.full((1, len(FLOAT_COLUMNS)), np.nan))).T.take(slot, axis=1)
    padded_counts = np.concatenate((counts, np.full((1, len(COUNT_COLUMNS)), -1))).T.take(slot, axis=1)
    for names, values, absent in (
        (FLOAT_COLUMNS, padded_floats, ~np.isfinite(padded_floats)),
        (COUNT_COLUMNS, padded_counts, padded_counts < 0),
    ):
        columns.update(zip(names, values, strict=True))
        masks.update(zip(names, absent, strict=True))


def _add_numbered(
    columns: dict[str, Any],
    masks: dict[str, npt.NDArray[np.bool_]],
    slot: npt.NDArray[np.int64],
    digests: npt.NDArray[np.uint64],
    sketches: npt.NDArray[np.float32],
) -> None:
    absent = slot < 0
    # A slot whose digest was not taken holds 0, which no tensor with elements has save by chance.
    columns["digest"] = np.append(digests, np.uint64(0))[slot]
    masks["digest"] = columns["digest"] == 0
    cells = sketches.shape[1]
    if cells:
        flat = np.concatenate((sketches, np.zeros((1, cells), np.float32)))[slot].reshape(-1)
        offsets = np.arange(0, len(flat) + 1, cells, dtype=np.int32)
        columns["sketch"] = pa.ListArray.from_arrays(offsets, flat, mask=pa.array(absent))


def _column(values: Any, kind: pa.DataType, mask: npt.NDArray[np.bool_] | None) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if pa.types.is_dictionary(kind):
        return _text(values).dictionary_encode()
    if pa.types.is_string(kind):
        return _text(values)
    return pa.array(values, kind, mask=mask)


def _text(values: Sequence[str | None]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        # A lone surrogate is legal in a Python name and not in UTF-8; the row must not be lost for it.
        escaped = [v if v is None else v.encode("utf-8", "backslashreplace").decode("utf-8") for v in values]
        return pa.array(escaped, pa.string())
