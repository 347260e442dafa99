"""A running job, read from its run directory: losses, gradient norm, norms by layer, and the last alerts.

Reads only the monitor's files and ``events.jsonl``; a job that has ended looks the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from msprobe_megatron.analysis.diagnose.suspects import SAME, order_of
from msprobe_megatron.analysis.load.run import RunError, find_monitor, rank_facts, run_facts, steps_of
from msprobe_megatron.run_directory.directory import read_events

_SHOWN = 8
_EVENTS = ("alert", "recorder", "fault", "check_missing", "check_fault", "alert_fault")
MEASURES = {
    "gradients": "kind = 'grad_reduced'",
    "activations": "kind = 'activation' and io = 'output' and regexp_matches(name, 'layers\\.\\d+$')",
}
# Gradients that are sharded over data-parallel ranks are added up; of replicas the first one is used.
_LAYERS = r"""
with chosen as (
    select step, cast(regexp_extract(name, 'layers\.(\d+)', 1) as integer) as layer, sumsq, shard, dp, cp, {bad} as bad
    from rows where {measure} and regexp_matches(name, 'layers\.\d+') and step > {after}
), cut as (select count(*) filter (where shard like '%flat%') > 0 as flat from chosen)
select layer, step, if(sum(bad) > 0, 'nan', sqrt(sum(sumsq)))
from chosen, cut where flat or (dp = 0 and cp = 0) group by layer, step
"""
_LOSS = """
select step, name, if(sum({bad}) > 0, 'nan', sum(sum) filter (where path in ('', '0'))) as total,
    sum(sum) filter (where path = '1') as tokens, count(*) filter (where path in ('', '0')) as rows
from rows where kind = 'loss' and name != 'grad_norm' and step > {after} group by step, name order by name, step
"""
_SCALARS = """
select step, name, if(sum({bad}) > 0, 'nan', max(sum)) from rows
where ((kind = 'loss' and name = 'grad_norm') or (kind = 'scalar' and name = 'learning_rate')
    or (kind = 'throughput' and name = 'seconds')) and step > {after}
group by step, name order by step
"""


_BAD = "coalesce(n_nan + n_posinf + n_neginf, 0)"


@dataclass
class Live:
    """Everything that `msprobe-megatron watch` shows. Curves are lists over `steps`, None where there is nothing."""

    path: str
    world: int
    ranks: int
    monitored: bool = True
    """False for a run whose probe file has no monitor section."""
    ended: bool = False
    """True once every rank has closed its part of the run; a job that was killed never does."""
    steps: list[int] = field(default_factory=list)
    age: float | None = None
    losses: dict[str, list[float | None]] = field(default_factory=dict)
    scalars: dict[str, list[float | None]] = field(default_factory=dict)
    measure: str = "gradients"
    layers: dict[int, list[float | None]] = field(default_factory=dict)
    alerts: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`, which has no NaN: it is the text "nan" there."""
        plain = asdict(self)
        for curves in ("losses", "scalars", "layers"):
            values = plain[curves].items()
            plain[curves] = {key: ["nan" if x is not None and math.isnan(x) else x for x in c] for key, c in values}
        return plain


def look(path: str | Path, window: int = 60, measure: str | None = None) -> Live:
    """Read the last `window` monitored steps of a run."""
    root = Path(path)
    if not (root / "run.json").is_file():
        raise RunError(f"{root}: no run.json; expected a run directory such as the --msprobe-output of a job")
    facts = run_facts(root / "run.json")
    events = [event for event in read_events(root) if event.get("event") in _EVENTS]
    files = _files(root, window)
    live = Live(str(root), int(facts.get("world", 1)), len({file.parent for file in files}))
    content = facts.get("probe", {}).get("content")
    live.monitored = bool(files) or not content or "monitor" in content
    live.ended = _ended(root)
    live.alerts = sum(event["event"] == "alert" for event in events)
    live.events = _last_events(events, facts)
    if files:
        live.age = time.time() - max(file.stat().st_mtime for file in files)
        _curves(live, files, window, measure)
    return live


def _ended(root: Path) -> bool:
    """Whether all ranks have closed; of a running job the first file tells that they have not."""
    files = sorted((root / "ranks").glob("rank_*.json"))
    try:
        return bool(files) and all(rank_facts(file).get("closed") for file in files)
    except RunError:
        return False


def _last_events(events: Sequence[dict[str, Any]], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The last events, those of one step in causal order; equal events of several ranks are one, with `ranks`."""
    listed = facts.get("ranks")
    found = [at for at in listed if isinstance(at, dict)] if isinstance(listed, list) else []
    places = {at["rank"]: at for at in found if isinstance(at.get("rank"), int)}
    began: dict[str, int] = {}
    for event in events:
        began.setdefault(repr(event.get("step")), len(began))
    merged: dict[tuple[str, ...], dict[str, Any]] = {}
    for event in sorted(events, key=lambda event: (began[repr(event.get("step"))], order_of(event, places))):
        alike = SAME if "name" in event else ("step", "event", "steps" if "steps" in event else "text")
        entry = merged.setdefault(tuple(repr(event.get(key)) for key in alike), {**event, "ranks": []})
        if isinstance(event.get("rank"), int):
            entry["ranks"] = sorted({*entry["ranks"], event["rank"]})
    return list(merged.values())[-_SHOWN:]


def _files(root: Path, window: int) -> list[Path]:
    """The monitor's files that hold one of the last `window` steps; unreadable ones are skipped."""
    parts = sorted(find_monitor(root, []), key=lambda part: part.last)
    steps: set[int] = set()
    for part in reversed(parts):
        if len(steps) >= window and part.last < min(sorted(steps)[-window:]):
            break
        steps.update(steps_of(part))
    recent = sorted(steps)[-window:]
    return [part.path for part in parts if recent and part.last >= recent[0]]


def _curves(live: Live, files: list[Path], window: int, measure: str | None) -> None:
    connection = duckdb.connect()
    connection.register("rows", connection.read_parquet([str(file) for file in files]))
    steps = [row[0] for row in connection.execute("select distinct step from rows order by step").fetchall()]
    live.steps = steps[-window:]
    after = live.steps[0] - 1 if live.steps else -1
    for step, name, total, tokens, rows in connection.execute(_filled(_LOSS, after)).fetchall():
        if total is not None:
            value = float(total) / (tokens or rows)
            _put(live, live.losses, name, step, value)
    for step, name, value in connection.execute(_filled(_SCALARS, after)).fetchall():
        _put(live, live.scalars, name, step, value)
    for name in [measure] if measure is not None else list(MEASURES):
        query = _filled(_LAYERS, after).replace("{measure}", MEASURES[name])
        live.measure = name
        for layer, step, value in connection.execute(query).fetchall():
            _put(live, live.layers, layer, step, value)
        if live.layers:
            break
    live.layers = dict(sorted(live.layers.items()))


def _filled(query: str, after: int) -> str:
    return query.replace("{after}", str(after)).replace("{bad}", _BAD)


def _put(live: Live, curves: dict[Any, list[float | None]], key: Any, step: int, value: float | None) -> None:
    curve = curves.setdefault(key, [None] * len(live.steps))
    curve[live.steps.index(step)] = None if value is None else float(value)
