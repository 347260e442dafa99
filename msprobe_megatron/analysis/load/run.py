"""Reading a run directory: facts, ranks, steps, events, and its rows as a DuckDB relation.

Opens what is there and says what is missing; never needs torch, Megatron or a live model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from msprobe_megatron.analyse.checked import RunError, rank_facts, rows_problem, run_facts
from msprobe_megatron.analyse.monitor_files import MonitorPart, find_monitor, steps_of
from msprobe_megatron.analyse.shard_rules import with_rules
from msprobe_megatron.config.errors import ConfigError
from msprobe_megatron.config.node import Context, Node
from msprobe_megatron.config.shards import ShardRule, parse_shards

__all__ = ["Run", "RunError", "open_run"]

_STEP = re.compile(r"step_(\d+)$")
_RANK = re.compile(r"rank_(\d+)(?:\.json)?$")


@dataclass
class Run:
    """One run directory.

    Example::

        run = open_run("probe_out")
        run.rows().aggregate("kind, count(*) as n", "kind").show()
    """

    path: Path
    facts: dict[str, Any]
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    files: list[tuple[int, int, Path]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    shards: tuple[ShardRule, ...] = ()
    """Shard specs given by the user, in place of recorded ones."""
    monitor: list[MonitorPart] = field(default_factory=list)
    """Files of the monitor. `files` and `rows` are the dump's, or the monitor's in a run that has no dump."""
    perturb: list[MonitorPart] = field(default_factory=list)
    """Files of the perturb part: rows of operators that were examined, with their verdicts."""

    @property
    def steps(self) -> list[int]:
        """Steps that have at least one file of rows."""
        return sorted({step for step, _, _ in self.files})

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every parallel axis."""
        return {str(k): int(v) for k, v in self.facts.get("sizes", {}).items()}

    def rows(
        self, connection: duckdb.DuckDBPyConnection | None = None, step: int | None = None
    ) -> duckdb.DuckDBPyRelation:
        """All rows (of one step) of all ranks; raises RunError if there are none."""
        paths = list(dict.fromkeys(str(path) for number, _, path in self.files if step is None or number == step))
        if not paths:
            if self.perturb:
                raise RunError(f"{self.path}: only examined operators were recorded; see msprobe-megatron diagnose")
            asked = "" if step is None else f" of step {step}; recorded steps: {self.steps or 'none'}"
            raise RunError(f"{self.path}: no rows{asked}")
        connection = connection if connection is not None else duckdb.connect()
        rows = connection.read_parquet(paths)
        if step is not None and self.monitor:
            rows = rows.filter(f"step = {int(step)}")
        return with_rules(connection, rows, self.shards, self.sizes) if self.shards else rows

    def monitor_rows(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """All rows of the monitor, of all ranks and steps; raises RunError if there are none."""
        if not self.monitor:
            raise RunError(f"{self.path}: no rows of the monitor; accepted: a run with a monitor section")
        connection = connection if connection is not None else duckdb.connect()
        return connection.read_parquet([str(part.path) for part in self.monitor])

    def perturb_rows(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """All rows of examined operators, of all ranks and steps; raises RunError if there are none."""
        if not self.perturb:
            raise RunError(f"{self.path}: no examined operators; accepted: a run with a perturb section")
        connection = connection if connection is not None else duckdb.connect()
        return connection.read_parquet([str(part.path) for part in self.perturb])


def open_run(path: str | Path, shards: tuple[ShardRule, ...] = ()) -> Run:
    """Read the facts of a run directory and find its files; `shards` go before those of the run's own probe file."""
    root = Path(path)
    if not root.is_dir():
        raise RunError(f"{root}: not a directory; expected a run directory (it holds run.json)")
    facts_file = root / "run.json"
    if not facts_file.is_file():
        raise RunError(f"{root}: no run.json; expected a run directory such as the --msprobe-output of a job")
    run = Run(root, run_facts(facts_file))
    run.shards = (*shards, *_own_rules(run, facts_file))
    for file in sorted((root / "ranks").glob("rank_*.json")):
        match = _RANK.search(file.name)
        if match and file.stat().st_size:
            try:
                run.ranks[int(match[1])] = rank_facts(file)
            except RunError as error:
                run.problems.append(str(error))
    for step_dir in sorted(root.glob("step_*")):
        step = _STEP.search(step_dir.name)
        for rank_dir in sorted(step_dir.glob("rank_*")) if step else ():
            rank = _RANK.search(rank_dir.name)
            if not rank or not step:
                continue
            file = rank_dir / "records.parquet"
            problem = rows_problem(file) if file.is_file() else "is not there"
            if problem is None:
                run.files.append((int(step[1]), int(rank[1]), file))
            else:
                run.problems.append(f"{file.relative_to(root)} {problem}")
    run.problems.extend(_missing(run))
    run.monitor = find_monitor(root, run.problems)
    run.perturb = find_monitor(root, run.problems, "perturb")
    if not run.files:
        run.files = sorted((step, part.rank, part.path) for part in run.monitor for step in steps_of(part))
    return run


def _own_rules(run: Run, source: Path) -> tuple[ShardRule, ...]:
    """Shard specs of the probe file that the job was started with."""
    given = run.facts.get("probe", {}).get("content", {}).get("shards", [])
    try:
        return parse_shards(Node(given, "probe.content.shards", Context(str(source))))
    except ConfigError as error:
        raise RunError(str(error)) from error


def _missing(run: Run) -> list[str]:
    """Steps that some ranks have and others, which recorded, do not."""
    recorded = {rank for _, rank, _ in run.files}
    found = []
    for step in run.steps:
        absent = sorted(recorded - {rank for number, rank, _ in run.files if number == step})
        if absent:
            found.append(f"step {step}: no rows from ranks {absent[:8]}{' …' if len(absent) > 8 else ''}")
    return found
