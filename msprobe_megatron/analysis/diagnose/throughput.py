"""Speed of a job and its scaling with the number of cards, from the monitor's throughput rows.

Every rank recorded the seconds between its steps, the samples it read and the memory it held. A job is as fast as its
slowest rank; the warm-up steps are excluded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import duckdb

from msprobe_megatron.analysis.load.run import Run, RunError

WARM_UP = 2
"""Monitored steps at the beginning of a run that are not counted."""


@dataclass(frozen=True)
class RunThroughput:
    """One run. `efficiency` and `speedup` are against the first run of a table; sizes are bytes of the fullest card."""

    name: str
    cards: int
    layout: str
    memory_bytes: int
    local_batch: float
    global_batch: float
    workers: int | None
    steps: int
    seconds: float
    iterations_per_second: float
    samples_per_second: float
    tokens_per_second: float
    slowest_rank: int
    last_loss: float | None
    seconds_to_loss: float | None
    speedup: float = 1.0
    efficiency: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """The line for `--json`."""
        return asdict(self)


def throughput(run: Run, target_loss: float | None = None) -> RunThroughput:
    """Read one run."""
    if not run.monitor:
        raise RunError(f"{run.path}: no throughput was recorded; add monitor: {{every: 1}} to its probe file")
    connection = duckdb.connect()
    rows = run.monitor_rows(connection).filter("kind in ('throughput', 'loss')")
    connection.register("watched", rows)
    first = connection.execute(
        "select coalesce(max(step), 0) from (select distinct step from watched order by step limit ?)", [WARM_UP]
    ).fetchone()
    by_rank = connection.execute(
        """select rank, any_value(dp), median(sum) filter (name = 'interval_seconds'),
            median(sum) filter (name = 'samples'), median(sum) filter (name = 'tokens'),
            max(sum) filter (name = 'device_bytes'), max(sum) filter (name = 'host_bytes'), count(distinct step)
            from watched where kind = 'throughput' and step > ? group by rank order by rank""",
        first,
    ).fetchall()
    by_rank = [row for row in by_rank if row[2] is not None]
    if not by_rank:
        raise RunError(f"{run.path}: too few steps were monitored; at least {WARM_UP + 2} are needed")
    slowest = max(by_rank, key=lambda row: row[2])
    seconds = float(slowest[2])
    sizes = run.sizes
    dp = sizes.get("dp", 1) or 1
    local = max(float(row[3] or 0) for row in by_rank)
    tokens = max(float(row[4] or 0) for row in by_rank)
    losses = _losses(connection)
    return RunThroughput(
        name=run.path.name,
        cards=int(run.facts.get("world", 1)),
        layout=layout_text(sizes),
        memory_bytes=int(max(row[5] or row[6] or 0 for row in by_rank)),
        local_batch=local,
        global_batch=local * dp,
        workers=_workers(run),
        steps=int(max(row[7] for row in by_rank)),
        seconds=seconds,
        iterations_per_second=1 / seconds,
        samples_per_second=local * dp / seconds,
        tokens_per_second=tokens * dp / seconds,
        slowest_rank=int(slowest[0]),
        last_loss=losses[-1][1] if losses else None,
        seconds_to_loss=_time_to(losses, target_loss, seconds),
    )


def by_rank(run: Run) -> dict[int, dict[str, float]]:
    """Median seconds between steps and peak memory of each rank; empty if nothing was monitored."""
    if not run.monitor:
        return {}
    rows = run.monitor_rows(duckdb.connect()).filter("kind = 'throughput'")
    found = rows.aggregate(
        """rank, median(sum) filter (name = 'interval_seconds'), max(sum) filter (name = 'device_bytes'),
        max(sum) filter (name = 'host_bytes')""",
        "rank",
    ).fetchall()
    return {
        int(rank): {"seconds": float(seconds), "bytes": float(device or host or 0)}
        for rank, seconds, device, host in found
        if seconds is not None
    }


def scaling(runs: Sequence[Run], target_loss: float | None = None) -> list[RunThroughput]:
    """The runs in order of their cards, with speed-up and parallel efficiency against the first."""
    found = sorted((throughput(run, target_loss) for run in runs), key=lambda line: line.cards)
    if not found:
        return []
    base = found[0]
    lines = []
    for line in found:
        speedup = line.samples_per_second / base.samples_per_second if base.samples_per_second else math.nan
        if not base.samples_per_second:  # a job whose data the kit cannot count
            speedup = line.iterations_per_second / base.iterations_per_second
        values = {**asdict(line), "speedup": speedup, "efficiency": speedup * base.cards / line.cards}
        lines.append(RunThroughput(**values))
    return lines


def layout_text(sizes: dict[str, int]) -> str:
    """Axes larger than 1 as text: ``TP2 PP2 DP4``; ``single`` when there is none."""
    cut = [f"{axis.upper()}{size}" for axis, size in sizes.items() if size > 1 and axis != "edp"]
    return " ".join(cut) or "single"


def _losses(connection: duckdb.DuckDBPyConnection) -> list[tuple[int, float]]:
    """Step and mean loss; Megatron reports the sum of the losses and the number of tokens."""
    rows = connection.execute(
        """select step, sum(sum) filter (path = '0') / sum(sum) filter (path = '1'), avg(sum) filter (path = '')
            from watched where kind = 'loss' and name <> 'grad_norm' group by step order by step"""
    ).fetchall()
    return [(int(step), float(value)) for step, ratio, mean in rows if (value := ratio or mean) is not None]


def _time_to(losses: Sequence[tuple[int, float]], target: float | None, seconds: float) -> float | None:
    if target is None or not losses:
        return None
    reached = next((step for step, loss in losses if loss <= target), None)
    return None if reached is None else (reached - losses[0][0] + 1) * seconds


def _workers(run: Run) -> int | None:
    value = run.facts.get("arguments", {}).get("num_workers")
    return value if isinstance(value, int) else None
