"""The tables behind the page: a run's rows and its merged tensors in one DuckDB connection, asked many times.

First station of every `view_*` query: they all take a `View` and return plain values that a page can embed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import duckdb

from msprobe_megatron.analyse.load import Run, RunError
from msprobe_megatron.analyse.merge import merge_query
from msprobe_megatron.record.schema import arrow_schema

KINDS = (
    *("loss", "activation", "gradient", "parameter", "grad_unreduced", "grad_reduced", "grad_clipped"),
    *("optimizer_state", "update", "data"),
)
"""Kinds whose rows are tensors that can be put together; the others are listed, not drawn."""

_DIGITS = 6


@dataclass(frozen=True)
class View:
    """A run opened for looking: table `whole` holds merged tensors, `run_rows` what each rank wrote.

    Example::

        view = open_view(open_run("probe_out"))
        view.ask("select step, count(*) from whole group by step")
    """

    run: Run
    connection: duckdb.DuckDBPyConnection

    def ask(self, query: str, values: list[Any] | None = None) -> list[tuple[Any, ...]]:
        """Rows of a query; values replace its question marks."""
        rows: list[tuple[Any, ...]] = self.connection.execute(query, values or []).fetchall()
        return rows


def open_view(run: Run, *, empty: bool = False) -> View:
    """Merge all steps of a run once; raises RunError if it has no rows of tensors, unless `empty` tables will do."""
    connection = duckdb.connect()
    connection.execute("set threads to 2")
    rows = connection.from_arrow(arrow_schema().empty_table()) if empty and not run.files else None
    query = merge_query(connection, run, None, "run", kinds=KINDS, rows=rows)
    connection.execute(f"create temp table whole as {query}")
    if not empty and not connection.execute("select count(*) from whole").fetchall()[0][0]:
        raise RunError(f"{run.path}: no rows of tensors to show")
    return View(run, connection)


def short(value: float | None) -> float | None:
    """A figure with as many digits as a page shows; None for what has no value.

    Example::

        >>> short(0.12345678)
        0.123457
    """
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def packed(values: list[Any]) -> Any:
    """One value instead of a list of equal ones: zero counts and constant weights cost nothing.

    Example::

        >>> packed([0, 0, 0]), packed([0, 1])
        (0, [0, 1])
    """
    return values[0] if values and all(value == values[0] for value in values) else values
