"""SQLite files for the TensorBoard plug-ins of msprobe: `*.trend.db` of the trend viewer, `*.vis.db` of the graph.

Only the plug-ins' tables and columns are the ancestor's; what stands in them comes from `analyse`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from msprobe_megatron.analysis.exports.graph import CONFIG_COLUMNS, NODE_COLUMNS, Graph
from msprobe_megatron.analysis.exports.trend import STATISTICS, TrendRow, tags_of
from msprobe_megatron.report.files.files import OutputError

_TREND_TABLES = f"""
create table monitoring_targets (target_id integer primary key autoincrement, target_name text not null,
    vpp_stage integer not null, micro_step integer not null, unique (target_name, vpp_stage, micro_step));
create table monitoring_metrics (metric_id integer primary key autoincrement, metric_name text not null unique);
create table monitoring_tags (tag_id integer primary key autoincrement, tag_name text not null, category text not null,
    metric_id integer not null, unique (tag_name, category, metric_id));
create table tag_target_mapping (target_id integer not null, tag_id integer not null, primary key (target_id, tag_id));
create table trend_data (rank integer not null, step integer not null, target_id integer not null,
    metric_id integer not null, {", ".join(f'"{name}" real' for name in STATISTICS)},
    primary key (rank, step, target_id, metric_id)) without rowid;
"""
_INDEXES = (
    *("step, rank, data_source, up_node, node_order", "step, rank, data_source, node_name"),
    *("step, rank, data_source, node_order", "step, rank, node_order", "step, rank, micro_step_id, node_order"),
    *("step, rank, modified, matched_node_link", "is_distributed"),
)


def write_trend(path: str | Path, rows: Iterable[TrendRow]) -> int:
    """Write a `*.trend.db`; returns its number of rows."""

    def fill(database: sqlite3.Connection) -> int:
        database.executescript(_TREND_TABLES)
        targets: dict[tuple[str, int, int], int] = {}
        metrics: dict[str, int] = {}
        used: set[tuple[int, int]] = set()
        steps: set[int] = set()
        ranks, count = 0, 0
        insert = f"insert into trend_data values ({', '.join('?' * (4 + len(STATISTICS)))})"  # noqa: S608
        for row in rows:
            target = targets.setdefault(row.target, len(targets) + 1)
            metric = metrics.setdefault(row.metric, len(metrics) + 1)
            used.add((metric, target))
            steps.add(row.step)
            ranks, count = max(ranks, row.rank), count + 1
            database.execute(insert, (row.rank, row.step, target, metric, *row.figures))
        database.executemany(
            "insert into monitoring_targets values (?, ?, ?, ?)",
            [(number, *target) for target, number in targets.items()],
        )
        database.executemany("insert into monitoring_metrics values (?, ?)", [(n, name) for name, n in metrics.items()])
        _tags(database, {number: target[0] for target, number in targets.items()}, used)
        _totals(database, metrics, steps, ranks)
        return count

    return _written(path, fill)


def _tags(database: sqlite3.Connection, names: dict[int, str], used: set[tuple[int, int]]) -> None:
    tags: dict[tuple[str, str, int], int] = {}
    pairs = []
    for metric, target in sorted(used):
        for name, category in tags_of(names[target]):
            pairs.append((target, tags.setdefault((name, category, metric), len(tags) + 1)))
    database.executemany("insert into monitoring_tags values (?, ?, ?, ?)", [(n, *tag) for tag, n in tags.items()])
    database.executemany("insert into tag_target_mapping values (?, ?)", pairs)


def _totals(database: sqlite3.Connection, metrics: dict[str, int], steps: set[int], ranks: int) -> None:
    """One row: the range of steps and ranks, and in a column of its own the statistics of each metric."""
    columns = "".join(f', "{name}" text' for name in metrics)
    database.execute(f"create table global_stats (max_rank integer, min_step integer, max_step integer{columns})")
    values = (ranks, min(steps, default=0), max(steps, default=0), *(",".join(STATISTICS) for _ in metrics))
    database.execute(f"insert into global_stats values ({', '.join('?' * len(values))})", values)  # noqa: S608


def write_graph(path: str | Path, graph: Graph) -> int:
    """Write a `*.vis.db`; returns its number of nodes."""

    def fill(database: sqlite3.Connection) -> int:
        database.execute(f"create table tb_nodes ({_declared(NODE_COLUMNS)})")
        database.execute("create table tb_stack (id text primary key, stack_info text)")
        database.execute(f"create table tb_config ({_declared(CONFIG_COLUMNS)})")
        count = 0
        insert = f"insert into tb_nodes values ({', '.join('?' * len(NODE_COLUMNS))})"  # noqa: S608
        for node in graph.nodes():
            database.execute(insert, tuple(_cell(node[name]) for name in NODE_COLUMNS))
            count += 1
        stacks = [(name, json.dumps(stack)) for name, stack in graph.stacks.items()]
        database.executemany("insert into tb_stack values (?, ?)", stacks)
        config = [_cell(graph.config[name]) for name in CONFIG_COLUMNS]
        database.execute(f"insert into tb_config values ({', '.join('?' * len(config))})", config)  # noqa: S608
        for number, columns in enumerate(_INDEXES, start=1):
            database.execute(f"create index index{number} on tb_nodes ({columns})")
        return count

    return _written(path, fill)


def _declared(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def _cell(value: object) -> object:
    """Lists and dicts are JSON text in the plug-in's tables."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _written(path: str | Path, fill: Callable[[sqlite3.Connection], int]) -> int:
    """Fill a database under a temporary name beside `path`, then rename."""
    target = Path(path)
    if target.is_dir():
        raise OutputError(f"{target}: is a directory; give the name of a file")
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(descriptor)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        with contextlib.closing(sqlite3.connect(temporary)) as database, database:
            count = fill(database)
        os.replace(temporary, target)
    except (OSError, sqlite3.OperationalError) as error:
        raise OutputError(f"{target}: cannot be written: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return count
