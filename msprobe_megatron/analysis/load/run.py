"""Reading a run directory: facts, ranks, steps, and its rows as a DuckDB relation.

Opens what exists and lists what is missing; never needs torch, Megatron or a live model. Run directories get copied:
they may be truncated, damaged or made by somebody else. All types are checked here, so other readers may rely on them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow.parquet as pq

from msprobe_megatron.analysis.load.shard_rules import with_rules
from msprobe_megatron.config.document import ConfigError, Context, Node
from msprobe_megatron.config.sections.shards import ShardRule, parse_shards

__all__ = ["Run", "RunError", "open_run"]

_STEP = re.compile(r"step_(\d+)$")
_RANK = re.compile(r"rank_(\d+)(?:\.json)?$")


@dataclass
class Run:
    """One run directory."""

    path: Path
    facts: dict[str, Any]
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    files: list[tuple[int, int, Path]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    shards: tuple[ShardRule, ...] = ()
    """Shard specs given by the user; they override the recorded ones."""
    monitor: list[MonitorPart] = field(default_factory=list)
    """Files of the monitor. `files` and `rows` are the dump's, and the monitor's for steps that were not dumped."""
    laws: list[MonitorPart] = field(default_factory=list)
    """Files that only laws read: elements sampled around the optimizer's step."""
    products: list[MonitorPart] = field(default_factory=list)
    """Files that only laws read: products that weight gradients must equal."""
    perturb: list[MonitorPart] = field(default_factory=list)
    """Files of perturb: rows of checked operators, with their verdicts."""

    @property
    def steps(self) -> list[int]:
        """Steps that have at least one file of rows."""
        return sorted({step for step, _, _ in self.files})

    @property
    def dumped_steps(self) -> list[int]:
        """Steps that the dump recorded; the others have the monitor's rows only."""
        shared = {part.path for part in self.monitor}
        return sorted({step for step, _, path in self.files if path not in shared})

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every parallel axis."""
        return {str(k): int(v) for k, v in self.facts.get("sizes", {}).items()}

    def rows(
        self, connection: duckdb.DuckDBPyConnection | None = None, step: int | None = None
    ) -> duckdb.DuckDBPyRelation:
        """All rows (of one step) of all ranks; raises RunError if there are none.

        A dumped step has the monitor's rows as well, of the kinds that the dump does not have.
        """
        if not any(step is None or number == step for number, _, _ in self.files):
            if self.perturb:
                raise RunError(f"{self.path}: only examined operators were recorded; see msprobe-megatron diagnose")
            requested = "" if step is None else f" of step {step}; recorded steps: {self.steps or 'none'}"
            raise RunError(f"{self.path}: no rows{requested}")
        connection = connection if connection is not None else duckdb.connect()
        rows = self._read(connection, set(self.steps) if step is None else {step})
        return with_rules(connection, rows, self.shards, self.sizes) if self.shards else rows

    def _read(self, connection: duckdb.DuckDBPyConnection, steps: set[int]) -> duckdb.DuckDBPyRelation:
        shared = {part.path for part in self.monitor}
        dumped = {str(path): None for step, _, path in self.files if step in steps and path not in shared}
        parts = [part for part in self.monitor if any(part.first <= step <= part.last for step in steps)]
        if not parts:
            return connection.read_parquet(list(dumped))
        monitored = connection.read_parquet([str(part.path) for part in parts])
        monitored = monitored.filter(f"step in ({', '.join(map(str, sorted(steps)))})")
        if not dumped:
            return monitored
        rows = connection.read_parquet(list(dumped))
        known = rows.project("step as known_step, kind as known_kind").distinct()
        added = monitored.join(known, "step = known_step and kind = known_kind", how="anti")
        return rows.union(added.project(", ".join(f'"{name}"' for name in rows.columns)))

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
    _read_ranks(run)
    _find_dump(run)
    run.problems.extend(_missing(run))
    run.monitor = find_monitor(root, run.problems)
    run.perturb = find_monitor(root, run.problems, "perturb")
    run.laws = find_monitor(root, run.problems, "laws")
    run.products = find_monitor(root, run.problems, "products")
    dumped = {step for step, _, _ in run.files}
    watched = [(step, part.rank, part.path) for part in run.monitor for step in steps_of(part) if step not in dumped]
    run.files = sorted([*run.files, *watched])
    return run


def _read_ranks(run: Run) -> None:
    for file in sorted((run.path / "ranks").glob("rank_*.json")):
        match = _RANK.search(file.name)
        if match and file.stat().st_size:
            try:
                run.ranks[int(match[1])] = rank_facts(file)
            except RunError as error:
                run.problems.append(str(error))


def _find_dump(run: Run) -> None:
    """Files of rows of the dump, by step and rank."""
    for folder in sorted(run.path.glob("step_*/rank_*")):
        step, rank = _STEP.search(folder.parent.name), _RANK.search(folder.name)
        if not rank or not step:
            continue
        file = folder / "records.parquet"
        problem = rows_problem(file) if file.is_file() else "is missing"
        if problem is None:
            run.files.append((int(step[1]), int(rank[1]), file))
        else:
            run.problems.append(f"{file.relative_to(run.path)} {problem}")


def _own_rules(run: Run, source: Path) -> tuple[ShardRule, ...]:
    """Shard specs of the probe file that the job was started with."""
    given = run.facts.get("probe", {}).get("content", {}).get("shards", [])
    try:
        return parse_shards(Node(given, "probe.content.shards", Context(str(source))))
    except ConfigError as error:
        raise RunError(str(error)) from error


def _missing(run: Run) -> list[str]:
    """Steps that some of the recording ranks have and others do not."""
    recorded = {rank for _, rank, _ in run.files}
    found = []
    for step in run.steps:
        absent = sorted(recorded - {rank for number, rank, _ in run.files if number == step})
        if absent:
            found.append(f"step {step}: no rows from ranks {absent[:8]}{' …' if len(absent) > 8 else ''}")
    return found


class RunError(Exception):
    """A directory that cannot be read as a run; the message names the file and the problem."""


_LARGEST = 256 << 20
# key -> type; keys that are absent are fine, older and imported runs have fewer.
_RUN_FACTS: dict[str, type | tuple[type, ...]] = {
    "world": int,
    "sizes": dict,
    "versions": dict,
    "environment": dict,
    "sources": dict,
    "arguments": dict,
    "effective": dict,
    "ranks": list,
    "probe": dict,
    "recompute": dict,
    "gradient_scale": (int, float, type(None)),
}
_RANK_FACTS: dict[str, type | tuple[type, ...]] = {
    "coordinates": dict,
    "chunks": list,
    "ledger": dict,
    "closed": bool,
    "own": dict,
}
_OWN: dict[str, type | tuple[type, ...]] = {"versions": dict, "probe": str, "clock": int}
_LEDGER: dict[str, type | tuple[type, ...]] = {
    "faults": list,
    "not_happened": list,
    "unmatched": list,
    "steps": list,
    "patches": list,
    "schedules": list,
    "written": dict,
    "fired": dict,
    "bound": dict,
    "asked": dict,
}
_LINE = {"id", "phase", "state", "fired", "reason", "why"}  # of the patches in a ledger
_MAGIC = b"PAR1"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; RunError names the file and what is wrong."""
    try:
        if path.stat().st_size > _LARGEST:
            raise RunError(f"{path}: {path.stat().st_size} bytes; accepted: at most {_LARGEST}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read: {str(error)[:200]}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path}: expected a JSON object")
    return content


def run_facts(path: Path) -> dict[str, Any]:
    """run.json, its types checked."""
    facts = read_json(path)
    _check(facts, _RUN_FACTS, path, "")
    for axis, size in facts.get("sizes", {}).items():
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 1 << 24:
            raise RunError(f"{path}: sizes.{axis}: {str(size)[:40]!r}; expected a size from 1")
    if not all(isinstance(entry, dict) for entry in facts.get("ranks", [])):
        raise RunError(f"{path}: ranks: expected a list of objects")
    content = facts.get("probe", {}).get("content", {})
    if not isinstance(content, dict):
        raise RunError(f"{path}: probe.content: expected an object")
    return facts


def rank_facts(path: Path) -> dict[str, Any]:
    """A rank's file, its types checked."""
    facts = read_json(path)
    _check(facts, _RANK_FACTS, path, "")
    _check(facts.get("ledger", {}), _LEDGER, path, "ledger.")
    _check(facts.get("own", {}), _OWN, path, "own.")
    if not all(isinstance(line, dict) and line.keys() >= _LINE for line in facts.get("ledger", {}).get("patches", [])):
        raise RunError(f"{path}: ledger.patches: expected lines with {', '.join(sorted(_LINE))}")
    return facts


def rows_problem(path: Path) -> str | None:
    """The reason why a file of rows cannot be opened, from its first and last bytes; None if it looks complete."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(4)
            file.seek(max(0, size - 4))
            tail = file.read(4)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if size >= 12 and head == tail == _MAGIC else "is not a whole Parquet file"


def _check(content: dict[str, Any], types: dict[str, Any], path: Path, prefix: str) -> None:
    for key, kind in types.items():
        value = content.get(key)
        wrong_number = isinstance(value, bool) and kind is int
        if key in content and (not isinstance(value, kind) or wrong_number):
            raise RunError(f"{path}: {prefix}{key}: {str(value)[:40]!r} is not what a run writes there")


_STEPS_FILE = re.compile(r"steps_(\d{1,18})_(\d{1,18})\.parquet$")


class MonitorPart(NamedTuple):
    """A file of one rank; its steps lie between ``first`` and ``last``."""

    rank: int
    first: int
    last: int
    path: Path


def find_monitor(root: Path, problems: list[str], kind: str = "monitor") -> list[MonitorPart]:
    """The files of all ranks in the order of rank and steps; damaged files are reported in ``problems``.

    ``kind`` is the folder; the files of perturb have the same form.
    """
    found = []
    for folder in sorted((root / kind).glob("rank_*")):
        rank = _RANK.search(folder.name)
        for path in sorted(folder.glob("steps_*.parquet")) if rank else ():
            steps = _STEPS_FILE.search(path.name)
            if rank is None or steps is None:
                continue
            problem = rows_problem(path)
            if problem is None:
                found.append(MonitorPart(int(rank[1]), int(steps[1]), int(steps[2]), path))
            else:
                problems.append(f"{path.relative_to(root)} {problem}")
    return sorted(found)


def steps_of(part: MonitorPart) -> list[int]:
    """The steps that a file contains."""
    column = pq.read_table(part.path, columns=["step"]).column("step")
    return sorted(int(step) for step in column.unique().to_pylist())
