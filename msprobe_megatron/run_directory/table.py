"""Rows and figures of one step as an Arrow table.

Runs in the writer thread, which shares the interpreter with training: hence whole columns at a time, and no
Python code for each cell. Steps of a training are alike: where the rows of a step are those of the last one, all
columns that do not hold figures are taken over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from msprobe_megatron.record.schema import COUNT_COLUMNS, FLOAT_COLUMNS, IDENTITY_COLUMNS, Row, arrow_schema
from msprobe_megatron.record.sightings import Sighting, cells_of

_FROM_ROW = frozenset(Row._fields) - {"slot", "site"}
_SCHEMA = arrow_schema()
_MOST_ROWS = 100_000


class Columns:
    """The columns of the last step that hold no figures, and the rows they were made of.

    Example::

        columns = Columns()
        build_table(10, rows, floats, counts, identity, columns=columns)
    """

    def __init__(self) -> None:
        self._rows: Sequence[Sighting | Row] | None = None
        self._identity: Mapping[str, int] = {}
        self._slot: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._arrays: dict[str, pa.Array] = {}

    def of(
        self, rows: Sequence[Sighting | Row], identity: Mapping[str, int]
    ) -> tuple[dict[str, pa.Array], npt.NDArray[np.int64]]:
        """Arrays by name, and the slot of each row."""
        if self._rows is None or rows != self._rows or identity != self._identity:
            self._make(rows, identity)
            # To keep the rows of a large step would cost more memory than making its columns costs time.
            self._rows, self._identity = rows if len(rows) <= _MOST_ROWS else None, dict(identity)
        return self._arrays, self._slot

    def _make(self, rows: Sequence[Sighting | Row], identity: Mapping[str, int]) -> None:
        cells = cells_of(rows)
        columns: dict[str, Any] = {name: cells[name] for name in _FROM_ROW}
        for name in IDENTITY_COLUMNS:
            columns[name] = np.full(len(rows), identity[name], np.int32 if name == "rank" else np.int16)
        site = np.array(cells["site"], np.int32)
        columns["site"] = site
        masks = {"site": site < 0}
        self._slot = np.array(cells["slot"], np.int64)
        self._arrays = {
            field.name: _column(columns[field.name], field.type, masks.get(field.name))
            for field in _SCHEMA
            if field.name in columns
        }


def build_table(
    step: int,
    rows: Sequence[Sighting | Row],
    floats: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    identity: Mapping[str, int],
    numbered: tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]] | None = None,
    columns: Columns | None = None,
) -> pa.Table:
    """Return the table of a step; figures that are not finite, or whose slot was never filled, become null.

    ``columns`` remembers those of the last step.

    Example::

        table = build_table(10, rows, *sealed.wait(), {"rank": 3, "tp": 1, ...})
    """
    if not rows:
        return _SCHEMA.empty_table()
    same, slot = (columns or Columns()).of(rows, identity)
    return table_of(same, *figures_of(step, slot, floats, counts, numbered))


def figures_of(
    step: int,
    slot: npt.NDArray[np.int64],
    floats: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    numbered: tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]] | None = None,
) -> tuple[dict[str, Any], dict[str, npt.NDArray[np.bool_]]]:
    """Columns that change from step to step, and where they are null.

    Example::

        figures, masks = figures_of(10, columns.of(rows, identity)[1], *sealed.wait())
    """
    figures: dict[str, Any] = {"step": np.full(len(slot), step, np.int64)}
    masks: dict[str, npt.NDArray[np.bool_]] = {}
    _add_figures(figures, masks, slot, floats, counts)
    if numbered is not None:
        _add_numbered(figures, masks, slot, *numbered)
    return figures, masks


def table_of(
    same: Mapping[str, pa.Array], figures: Mapping[str, Any], masks: Mapping[str, npt.NDArray[np.bool_]]
) -> pa.Table:
    """All columns in their order.

    Example::

        table = table_of(columns.of(rows, identity)[0], figures, masks)
    """
    arrays = [
        _column(figures[field.name], field.type, masks.get(field.name)) if field.name in figures else same[field.name]
        for field in _SCHEMA
    ]
    return pa.table(arrays, schema=_SCHEMA)


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
    padded_floats = np.concatenate((floats, np.full((1, len(FLOAT_COLUMNS)), np.nan))).T.take(slot, axis=1)
    padded_counts = np.concatenate((counts, np.full((1, len(COUNT_COLUMNS)), -1))).T.take(slot, axis=1)
    for names, figures, absent in (
        (FLOAT_COLUMNS, padded_floats, ~np.isfinite(padded_floats)),
        (COUNT_COLUMNS, padded_counts, padded_counts < 0),
    ):
        columns.update(zip(names, figures, strict=True))
        masks.update(zip(names, absent, strict=True))


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
