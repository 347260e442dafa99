"""The model as the run saw it: stages with their ranks and layers, and for every name its class and call stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msprobe_megatron.analyse.view_table import View

_FRAMES = 12


def stages(view: View) -> list[dict[str, Any]]:
    """Pipeline stages, each with its ranks and the names it holds, in order of execution.

    Example::

        [(stage["pp"], stage["ranks"]) for stage in stages(view)]
    """
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


def sites(view: View) -> dict[str, Any]:
    """Class and call stack of every module, from the first recorded step that knows it; frames are shared.

    Example::

        table = sites(view)
        [table["frames"][i] for i in table["modules"]["decoder.layers.0"]["stack"]]
    """
    numbers: dict[str, int] = {}
    modules: dict[str, dict[str, Any]] = {}
    first = view.run.steps[:1]
    for number, _, path in view.run.files:
        if number not in first:
            continue
        for name, kind, stack in sites_of(path.parent / "sites.json"):
            if name not in modules:
                indices = [numbers.setdefault(frame, len(numbers)) for frame in stack[:_FRAMES]]
                modules[name] = {"class": kind, "stack": indices}
    return {"frames": list(numbers), "modules": modules}


def sites_of(path: Path) -> list[tuple[str, str, list[str]]]:
    """Name, class and call stack of every module in a `sites.json`; nothing where it cannot be read.

    Example::

        sites_of(Path("probe_out/step_000000/rank_00000/sites.json"))[0]
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["modules"]
        return [
            (str(module["name"]), str(module.get("class", "")), [str(frame) for frame in module.get("stack", [])])
            for module in found
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
