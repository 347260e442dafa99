"""Rows and figures of one step as an Arrow table.

Runs in the writer thread, which shares the interpreter with training: hence whole columns at a time, and no
Python code for each cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from msprobe_megatron.record.schema import COUNT_COLUMNS, FLOAT_COLUMNS, IDENTITY_COLUMNS, Row, arrow_schema

_FROM_ROW = frozenset(Row._fields) - {"slot", "site"}


def build_table(
    step: int,
    rows: Sequence[Row],
    floats: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    identity: Mapping[str, int],
    numbered: tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]] | None = None,
) -> pa.Table:
    """Return the table of a step; figures that are not finite, or whose slot was never filled, become null.

    Example::

        table = build_table(10, rows, *sealed.wait(), {"rank": 3, "tp": 1, ...})
    """
    schema = arrow_schema()
    if not rows:
        return schema.empty_table()
    cells = dict(zip(Row._fields, zip(*rows, strict=True), strict=True))
    columns: dict[str, Any] = {name: cells[name] for name in _FROM_ROW}
    columns["step"] = np.full(len(rows), step, np.int64)
    for name in IDENTITY_COLUMNS:
        columns[name] = np.full(len(rows), identity[name], np.int32 if name == "rank" else np.int16)
    site = np.array(cells["site"], np.int32)
    masks = {"site": site < 0}
    columns["site"] = site
    slot = np.array(cells["slot"], np.int64)
    _add_figures(columns, masks, slot, floats, counts)
    if numbered is not None:
        _add_numbered(columns, masks, slot, *numbered)
    arrays = [_column(columns[field.name], field.type, masks.get(field.name)) for field in schema]
    return pa.table(arrays, schema=schema)


def _add_figures(
    columns: dict[str, Any],
    masks: dict[str, npt.NDArray[np.bool_]],
    slot: npt.NDArray[np.int64],
    floats: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
) -> None:
    if slot.max(initial=-1) >= len(floats):
        raise IndexError(f"slot {slot.max()} of a row is not among the {len(floats)} of its step")
    # One line more than there are slots, at -1, for the rows that have none. NaN and -1 mean absent.
    padded_floats = np.concatenate((floats, np.full((1, len(FLOAT_COLUMNS)), np.nan)))[slot]
    padded_counts = np.concatenate((counts, np.full((1, len(COUNT_COLUMNS)), -1)))[slot]
    for names, figures, absent in (
        (FLOAT_COLUMNS, padded_floats, ~np.isfinite(padded_floats)),
        (COUNT_COLUMNS, padded_counts, padded_counts < 0),
    ):
        for index, name in enumerate(names):
            columns[name] = np.ascontiguousarray(figures[:, index])
            masks[name] = absent[:, index]


def _add_numbered(
    columns: dict[str, Any],
    masks: dict[str, npt.NDArray[np.bool_]],
    slot: npt.NDArray[np.int64],
    digests: npt.NDArray[np.uint64],
    sketches: npt.NDArray[np.float32],
) -> None:
    absent = slot < 0
    columns["digest"], masks["digest"] = np.append(digests, np.uint64(0))[slot], absent
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
