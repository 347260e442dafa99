"""Everything the page shows, as plain values: one run, or a run beside a golden one.

What happened while the job ran (alerts, suspect operators, checks among ranks, the event log, the ledgers) is collected
here; trends, verdict and comparison come from the modules beside it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from msprobe_megatron.analysis.compare.compare import Comparison, compare
from msprobe_megatron.analysis.diagnose.summary import warnings
from msprobe_megatron.analysis.diagnose.suspects import anomalies, suspects
from msprobe_megatron.analysis.load.run import Run, steps_of
from msprobe_megatron.analysis.page.findings import PageVerdict, event_key, verdict_of
from msprobe_megatron.analysis.page.table import RunView, open_view, sites, stages
from msprobe_megatron.analysis.page.trends import (
    communication,
    disagreements,
    heat_maps,
    losses,
    rank_grid,
    series,
    shards,
)
from msprobe_megatron.analysis.page.versus import (
    difference_map,
    flow,
    follow,
    setup_differences,
    states,
    verdict_against,
)
from msprobe_megatron.run_directory.directory import read_events


def page_data(run: Run, golden: Run | None = None) -> dict[str, Any]:
    """Everything the page shows, as plain values."""
    view = open_view(run, empty=True)
    warned = warnings(run)
    replicas = disagreements(view)
    verdict = verdict_of(view, replicas, warned)
    comparison = None
    if golden is not None:
        comparison = compare(golden, run)
        verdict = verdict_against(comparison, verdict)
    important = set(verdict.steps)
    trends = series(view, important)
    heat = heat_maps(view, important)
    parts = shards(view, verdict.steps)
    log = {**events(run), "warnings": warned, "ledgers": ledgers(run)}
    alerted = alerts(run)
    exchanged = communication(run, [*verdict.steps, *run.steps[-1:]])
    notes = [
        note for part in (trends, heat, parts, alerted, log, log["ledgers"], exchanged) for note in part.pop("notes")
    ]
    return {
        "run": _facts(run),
        "verdict": verdict.as_dict(),
        "series": trends,
        "losses": losses(view),
        "heat": heat,
        "stages": stages(view),
        "sites": sites(view),
        "shards": parts,
        "ranks": rank_grid(view),
        "replicas": replicas,
        "comm": exchanged,
        "alerts": alerted["alerts"],
        "perturb": examined(run),
        "checks": compared(run),
        "log": log,
        "notes": notes,
        "versus": None if golden is None or comparison is None else _versus(golden, view, comparison, verdict),
    }


def _versus(golden: Run, of_run: RunView, comparison: Comparison, verdict: PageVerdict) -> dict[str, Any]:
    run = of_run.run
    trends: dict[str, Any] = {"steps": [], "tensors": []}
    curves = None
    if golden.files:
        view = open_view(golden, empty=True)
        trends, curves = series(view, set(verdict.steps)), losses(view)
    path = flow(comparison)
    way = follow(path, of_run)
    return {
        "run": _facts(golden),
        "comparison": comparison.as_dict(),
        "states": states(comparison),
        "flow": path,
        "way": way,
        "map": difference_map(comparison),
        "setup": setup_differences(golden, run),
        "series": trends,
        "losses": curves,
    }


def _facts(run: Run) -> dict[str, Any]:
    names = (
        "started",
        "versions",
        "environment",
        "sources",
        "world",
        "sizes",
        "seed",
        "recompute",
        "unseen",
        "arguments",
    )
    return {"path": str(run.path), "steps": run.steps, **{name: run.facts.get(name) for name in (*names, "probe")}}


_ALERTS = 500
_SUSPECTS = 100


def alerts(run: Run) -> dict[str, Any]:
    """Alerts and failed checks of all ranks as one list, causes first; at most 500."""
    found = anomalies(run)
    plain = [
        {
            "step": anomaly.event.get("step"),
            "ranks": anomaly.ranks,
            "rule": str(anomaly.event.get("rule", anomaly.event.get("event"))),
            "name": str(anomaly.event.get("name", "")),
            "text": anomaly.text,
            "key": event_key(anomaly.event),
        }
        for anomaly in found[:_ALERTS]
    ]
    notes = [f"{_ALERTS} of {len(found)} alerts are shown."] if len(found) > _ALERTS else []
    return {"alerts": plain, "notes": notes}


def examined(run: Run) -> dict[str, Any] | None:
    """Operators that perturb checked: number, verdicts, and the suspects, worst first; None without perturb."""
    if not run.perturb:
        return None
    rows = run.perturb_rows()
    counts = rows.aggregate("json_extract_string(extra, '$.verdict') as verdict, count(*)", "verdict").fetchall()
    (operators,) = rows.aggregate("count(distinct name)").fetchall()[0]
    return {
        "steps": sorted({step for part in run.perturb for step in steps_of(part)}),
        "operators": int(operators),
        "verdicts": {str(verdict): int(count) for verdict, count in counts},
        "suspects": [asdict(suspect) for suspect in suspects(run)[:_SUSPECTS]],
    }


def compared(run: Run) -> list[dict[str, Any]]:
    """Groups of ranks that `checks` compared, each once, with the number of comparisons and what was left out."""
    found: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for _, facts in sorted(run.ranks.items()):
        checks = facts.get("ledger", {}).get("checks")
        for label, ranks in (checks or {}).get("groups", {}).items():
            entry = {"group": str(label), "ranks": list(ranks), "times": int(checks.get("compared") or 0)}
            entry["notes"] = [str(text) for text in (*checks.get("notes", ()), checks.get("fault") or "") if text]
            found.setdefault((str(label), tuple(ranks)), entry)
    return list(found.values())


_EVENTS = 2000
_RANKS = 64


def events(run: Run) -> dict[str, Any]:
    """Alerts, faults and drops in the order they were written; at most 2,000."""
    found = read_events(run.path)
    plain = [
        {
            "event": str(event.get("event", "")),
            "rank": event.get("rank"),
            "step": event.get("step"),
            "time": event.get("time"),
            "text": str(event.get("text", "")),
        }
        for event in found[:_EVENTS]
    ]
    notes = [f"{_EVENTS} of {len(found)} events are shown."] if len(found) > _EVENTS else []
    return {"events": plain, "notes": notes}


def ledgers(run: Run) -> dict[str, Any]:
    """Requests, bindings, observations and amounts written of each rank, and the patches; equal ranks are grouped."""
    groups: dict[str, dict[str, Any]] = {}
    for rank, facts in sorted(run.ranks.items()):
        ledger = facts.get("ledger", {})
        own = ("patches", "written")  # shown separately
        plain = {name: value for name, value in ledger.items() if name not in own and value not in (None, [], {})}
        # Sizes of compressed files differ between ranks that did the same.
        sizes = ("bytes_written", "bytes_dropped")
        plain["written"] = {name: n for name, n in ledger.get("written", {}).items() if name not in sizes}
        plain["closed"] = facts.get("closed", False)
        groups.setdefault(repr(plain), {"ranks": [], "ledger": plain})["ranks"].append(rank)
    patches: dict[str, dict[str, Any]] = {}
    for facts in run.ranks.values():
        for patch in facts.get("ledger", {}).get("patches", []):
            entry = patches.setdefault(str(patch.get("id")), {**patch, "fired": 0})
            entry["fired"] += int(patch.get("fired") or 0)
    shown = list(groups.values())[:_RANKS]
    notes = [f"{_RANKS} of {len(groups)} different ledgers are shown."] if len(groups) > _RANKS else []
    return {"groups": shown, "patches": list(patches.values()), "notes": notes}
