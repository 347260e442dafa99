"""Rows of several steps as one Arrow table, and rows of several microbatches as one row.

For the writer thread. Steps that watch the same things share their list of rows: what does not change from step to
step is built once for all of them, and only the figures are laid out step by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from msprobe_megatron.record.schema import COUNT_COLUMNS, FLOAT_COLUMNS, Row
from msprobe_megatron.record.table import build_table

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class Figures(NamedTuple):
    """The figures of one step, a line a slot; ``digests`` are those of rows of kind ``data``."""

    step: int
    floats: Floats
    counts: Counts
    digests: npt.NDArray[np.uint64] | None = None


def steps_table(rows: list[Row], steps: Sequence[Figures], identity: Mapping[str, int]) -> pa.Table:
    """One table of all ``steps``, which share ``rows``, in the columns of `record.schema`.

    Example::

        steps_table(rows, [Figures(0, floats, counts), Figures(1, floats, counts)], identity).num_rows
    """
    slot = np.array([row.slot for row in rows], np.int64)
    lines = len(FLOAT_COLUMNS)
    nothing = np.full((slot.max(initial=-1) + 1, lines), np.nan), np.full((slot.max(initial=-1) + 1, 4), -1)
    table = pa.concat_tables([build_table(0, rows, *nothing, identity)] * len(steps))
    floats = np.concatenate([_at(figures.floats, slot, np.nan) for figures in steps])
    counts = np.concatenate([_at(figures.counts, slot, -1) for figures in steps])
    columns = {"step": pa.array(np.repeat([figures.step for figures in steps], len(rows)), pa.int64())}
    for index, name in enumerate(FLOAT_COLUMNS):
        column = np.ascontiguousarray(floats[:, index])
        columns[name] = pa.array(column, pa.float64(), mask=~np.isfinite(column))
    for index, name in enumerate(COUNT_COLUMNS):
        column = np.ascontiguousarray(counts[:, index])
        columns[name] = pa.array(column, pa.int64(), mask=column < 0)
    if steps[0].digests is not None:
        digests = np.concatenate([_at(figures.digests, slot, 0) for figures in steps if figures.digests is not None])
        absent = np.tile([row.kind != "data" or row.slot < 0 for row in rows], len(steps))
        columns["digest"] = pa.array(digests, pa.uint64(), mask=absent)
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
    return table


def _at(figures: npt.NDArray[np.generic], slot: npt.NDArray[np.int64], absent: float) -> npt.NDArray[np.generic]:
    """The lines of the slots; -1 is a line of absent figures."""
    last = np.full((1, *figures.shape[1:]), absent, figures.dtype)
    return np.concatenate((figures, last))[slot]


class Summed:
    """Rows of all microbatches of a step as one row: sums add, extremes combine, the number of elements adds.

    Example::

        summed = Summed(rows)
        floats, counts = summed.figures(floats, counts)
        summed.rows[0].microbatch                     # None
    """

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

    def figures(self, floats: Floats, counts: Counts) -> tuple[Floats, Counts]:
        """The figures of the summed rows."""
        slots, lines, number = np.array(self._slots, np.int64), np.array(self._lines, np.int64), len(self.rows)
        told, summed = np.full((number, 5), np.nan), np.full((number, 4), -1, np.int64)
        part, also = floats[slots], counts[slots]
        order = np.argsort(lines, kind="stable")
        if len(order):
            edges = np.flatnonzero(np.diff(lines[order], prepend=-1))
            which = lines[order][edges]
            for column, reduce in enumerate((np.fmin, np.fmax, np.add, np.add, np.fmax)):
                told[which, column] = reduce.reduceat(part[order, column], edges)
            summed[which] = np.add.reduceat(also[order], edges, axis=0)
            summed[summed < 0] = -1
        return told, summed

    def digests(self, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The digests of the summed rows; rows that have one are never summed."""
        found = np.zeros(len(self.rows), np.uint64)
        found[self._lines] = digests[self._slots]
        return found
