"""Puts the page together: what `analyse` found as one block of data, and the styles and scripts that show it.

Last station of the data path: nothing is computed here. The page needs no network and no server; its scripts are the
files of `assets/`, one a part of the page, joined in the order below.
"""

from __future__ import annotations

from importlib.resources import files
from string import Template
from typing import Any

from msprobe_megatron.analyse.compare import Comparison, compare
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.summary import warnings
from msprobe_megatron.analyse.view_alerts import alerts, compared, examined
from msprobe_megatron.analyse.view_comm import communication
from msprobe_megatron.analyse.view_findings import Verdict, verdict_of
from msprobe_megatron.analyse.view_flow import flow, follow
from msprobe_megatron.analyse.view_heat import heat_maps
from msprobe_megatron.analyse.view_log import events, ledgers
from msprobe_megatron.analyse.view_ranks import disagreements, rank_grid
from msprobe_megatron.analyse.view_series import losses, series
from msprobe_megatron.analyse.view_shards import shards
from msprobe_megatron.analyse.view_table import View, open_view
from msprobe_megatron.analyse.view_tree import sites, stages
from msprobe_megatron.analyse.view_versus import difference_map, setup_differences, states, verdict_against
from msprobe_megatron.report.html.embed import embedded_json, policy

_SCRIPTS = ("base", "charts", "heat", "overview", "where", "when", "who", "findings", "versus", "log", "start")
_STYLES = ("theme", "layout", "parts")


def page_data(run: Run, golden: Run | None = None) -> dict[str, Any]:
    """Everything the page shows, as plain values.

    Example::

        page_data(open_run("probe_out"))["verdict"]["headline"]
    """
    view = open_view(run, empty=True)
    said = warnings(run)
    replicas = disagreements(view)
    verdict = verdict_of(view, replicas, said)
    comparison = None
    if golden is not None:
        comparison = compare(golden, run)
        verdict = verdict_against(comparison, verdict)
    important = set(verdict.steps)
    trends = series(view, important)
    heat = heat_maps(view, important)
    parts = shards(view, verdict.steps)
    log = {**events(run), "warnings": said, "ledgers": ledgers(run)}
    told = alerts(run)
    exchanged = communication(run, [*verdict.steps, *run.steps[-1:]])
    notes = [note for part in (trends, heat, parts, told, log, log["ledgers"], exchanged) for note in part.pop("notes")]
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
        "alerts": told["alerts"],
        "perturb": examined(run),
        "checks": compared(run),
        "log": log,
        "notes": notes,
        "versus": None if golden is None or comparison is None else _versus(golden, view, comparison, verdict),
    }


def _versus(golden: Run, of_run: View, comparison: Comparison, verdict: Verdict) -> dict[str, Any]:
    run = of_run.run
    trends: dict[str, Any] = {"steps": [], "tensors": []}
    curves = None
    if golden.files:
        view: View = open_view(golden, empty=True)
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


def page(data: dict[str, Any]) -> str:
    """The HTML text of the data that `page_data` made.

    Example::

        Path("report.html").write_text(page(page_data(open_run("probe_out"))), encoding="utf-8")
    """
    script = '"use strict";\n' + "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    style = "\n".join(_asset(f"{name}.css") for name in _STYLES)
    return Template(_asset("page.html")).substitute(
        policy=policy(script, style), style=style, script=script, data=embedded_json(data)
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")
