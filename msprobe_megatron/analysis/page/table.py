"""The tables behind the page: a run's rows and merged tensors in one DuckDB connection, and the model they describe.

Every function of this folder takes a `RunView` and returns plain values that a page can embed. `stages` and `sites` are
the model as the run recorded it: pipeline stages with their ranks, and the class and call stack of every module.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from msprobe_megatron.analysis.compare.merge import merge_query
from msprobe_megatron.analysis.load.run import Run, RunError
from msprobe_megatron.run_directory.schema import arrow_schema

KINDS = (
    "loss",
    "activation",
    "gradient",
    "parameter",
    "grad_unreduced",
    "grad_reduced",
    "grad_clipped",
    "optimizer_state",
    "update",
    "data",
)
"""Kinds whose rows are tensors that can be merged; the others are listed, not drawn."""

_DIGITS = 6


@dataclass(frozen=True)
class RunView:
    """A run opened for queries: table `whole` holds merged tensors, `run_rows` the rows of each rank."""

    run: Run
    connection: duckdb.DuckDBPyConnection

    def ask(self, query: str, values: list[Any] | None = None) -> list[tuple[Any, ...]]:
        """Rows of a query; values replace its question marks."""
        rows: list[tuple[Any, ...]] = self.connection.execute(query, values or []).fetchall()
        return rows


def open_view(run: Run, *, empty: bool = False) -> RunView:
    """Merge all steps of a run once; raises RunError if it has no rows of tensors, unless `empty` tables will do."""
    connection = duckdb.connect()
    connection.execute("set threads to 2")
    rows = connection.from_arrow(arrow_schema().empty_table()) if empty and not run.files else None
    query = merge_query(connection, run, None, "run", kinds=KINDS, rows=rows)
    connection.execute(f"create temp table whole as {query}")
    if not empty and not connection.execute("select count(*) from whole").fetchall()[0][0]:
        raise RunError(f"{run.path}: no rows of tensors to show")
    return RunView(run, connection)


def short(value: float | None) -> float | None:
    """A number with as many digits as a page shows; None if it is missing or not finite.

    Example::

        >>> short(0.12345678)
        0.123457
    """
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def packed(values: list[Any]) -> Any:
    """One value instead of a list of equal ones, so that zero counts and constant weights cost no space.

    Example::

        >>> packed([0, 0, 0]), packed([0, 1])
        (0, [0, 1])
    """
    return values[0] if values and all(value == values[0] for value in values) else values


_FRAMES = 12


def stages(view: RunView) -> list[dict[str, Any]]:
    """Pipeline stages, each with its ranks and the names it holds, in order of execution."""
    rows = view.ask(
        """select pp, name, min(seq) from run_rows where kind not in ('loss', 'comm', 'throughput')
        group by pp, name order by pp, min(seq)"""
    )
    found: dict[int, dict[str, Any]] = {}
    for pp, name, _ in rows:
        found.setdefault(pp, {"pp": pp, "ranks": [], "names": []})["names"].append(name)
    for pp, rank in view.ask("select distinct pp, rank from run_rows order by pp, rank"):
        if pp in found:
            found[pp]["ranks"].append(rank)
    return [found[pp] for pp in sorted(found)]


def sites(view: RunView) -> dict[str, Any]:
    """Class and call stack of every module, from the first recorded step that knows it; frames are shared."""
    numbers: dict[str, int] = {}
    modules: dict[str, dict[str, Any]] = {}
    first = view.run.dumped_steps[:1]
    for number, _, path in view.run.files:
        if number not in first:
            continue
        for name, kind, stack in sites_of(path.parent / "sites.json"):
            if name not in modules:
                indices = [numbers.setdefault(frame, len(numbers)) for frame in stack[:_FRAMES]]
                modules[name] = {"class": kind, "stack": indices}
    return {"frames": list(numbers), "modules": modules}


def sites_of(path: Path) -> list[tuple[str, str, list[str]]]:
    """Name, class and call stack of every module in a `sites.json`; empty if it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["modules"]
        return [
            (str(module["name"]), str(module.get("class", "")), [str(frame) for frame in module.get("stack", [])])
            for module in found
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
