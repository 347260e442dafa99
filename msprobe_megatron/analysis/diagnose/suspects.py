"""Operators that perturb found fragile or wrong: one suspect an operator and verdict, worst first, and what to do next.

A NaN or an Inf comes before everything else, the earliest first: it is what others inherit. Then what is certain, by
how far it is over its limit. Layers that have the same operator with the same verdict are one suspect.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from msprobe_megatron.analyse.load import Run
from msprobe_megatron.topology.layers import layer_of

_LAYER = re.compile(r"(^|\.)layers\.\d+")
_WEIGHT = {"nan": 0, "inf": 0, "odd": 1, "wrong": 1, "nondeterministic": 2, "sign": 2, "changed": 3, "fragile": 4}
_SURE = {"nan": "certain", "inf": "certain", "nondeterministic": "certain", "wrong": "certain", "odd": "likely"}
_SHOWN_STEPS = 5


@dataclass(frozen=True)
class Suspect:
    """An operator with a verdict: where it stands, how often it was found in how many looks, and the worst figures."""

    name: str
    op: str
    verdict: str
    stage: str
    layers: list[int]
    steps: list[int]
    ranks: list[int]
    microbatch: int | None
    times: int
    looks: int
    severity: float
    figures: dict[str, Any]
    text: str
    sure: str
    next: str


def suspects(run: Run, step: int | None = None) -> list[Suspect]:
    """The suspects of a run, or of one of its steps.

    Example::

        suspects(open_run("probe_out"))[0].text
    """
    if not run.perturb:
        return []
    rows = run.perturb_rows()
    if step is not None:
        rows = rows.filter(f"step = {int(step)}")
    looks: dict[str, int] = defaultdict(int)
    for name, count in rows.aggregate("name, count(*)", "name").fetchall():
        looks[_place(str(name))] += int(count)
    groups: dict[tuple[str, str, str], list[tuple[Any, ...]]] = defaultdict(list)
    wrong = rows.filter("json_extract_string(extra, '$.verdict') <> 'ok'")
    for row in wrong.project("step, seq, rank, microbatch, name, op, path, extra").order("step, seq").fetchall():
        extra = _read(row[7])
        groups[_place(str(row[4])), str(extra.get("verdict")), str(extra.get("stage"))].append((*row[:7], extra))
    found = [_suspect(run, place, rows_of, looks[place]) for (place, _, _), rows_of in groups.items()]
    return [suspect for _, suspect in sorted(found, key=lambda pair: pair[0])]


def _suspect(run: Run, place: str, rows: list[tuple[Any, ...]], looks: int) -> tuple[tuple[float, ...], Suspect]:
    worst = max(rows, key=lambda row: float(row[7].get("severity") or 0.0))
    step, seq, _, microbatch, name, op, _, extra = rows[0] if worst[7].get("verdict") in ("nan", "inf") else worst
    verdict, stage = str(extra.get("verdict")), str(extra.get("stage"))
    layers = sorted({layer for row in rows if (layer := layer_of(str(row[4]).partition("/")[0])) is not None})
    steps = sorted({int(row[0]) for row in rows})
    ranks = sorted({int(row[2]) for row in rows})
    severity = float(worst[7].get("severity") or 0.0)
    keys = ("ulp", "over", "kappa", "threshold", "max_rel", "different", "where", "note", "mode", "class", "profile")
    figures = {key: extra[key] for key in keys if key in extra}
    at = "" if microbatch is None else f", microbatch {microbatch}"
    where = f"step {steps[0]}{at}, ranks {ranks[:4]}"
    several = f" (layers {layers})" if len(layers) > 1 else ""
    text = f"{name}{several}: {_words(verdict, figures)}; {stage}, {where}; {len(rows)} of {looks} looks"
    weight = _WEIGHT.get(verdict, 5)
    order = (weight, step, seq) if weight == 0 else (weight, -severity, step)
    return order, Suspect(
        str(name),
        str(op),
        verdict,
        stage,
        layers,
        steps[:_SHOWN_STEPS],
        ranks,
        microbatch,
        len(rows),
        looks,
        severity,
        figures,
        text,
        _SURE.get(verdict, "possible"),
        _next(run, verdict, str(name), str(op), layers, steps[0]),
    )


def _words(verdict: str, figures: dict[str, Any]) -> str:
    ulp = f"{float(figures['ulp']):.3g} units in the last place off" if "ulp" in figures else ""
    limit = f"{float(figures['over']):.3g} times what its class may be" if figures.get("over") else ""
    return {
        "nan": "gives NaN where the exact operator does not",
        "inf": "gives Inf where the exact operator does not",
        "wrong": f"wrong: {', '.join(part for part in (ulp, limit) if part)}",
        "nondeterministic": f"gives another result for the same inputs ({ulp})",
        "fragile": f"a change in the last place of its input comes out {float(figures.get('kappa', 0)):.3g} times as"
        f" large (limit {float(figures.get('threshold', 0)):.3g})",
        "odd": str(figures.get("note", "has another constant than other layers")),
        "sign": "signs flip",
        "changed": f"changed by {figures.get('max_rel', figures.get('ulp'))} (threshold {figures.get('threshold')})",
    }.get(verdict, verdict)


def _next(run: Run, verdict: str, name: str, op: str, layers: list[int], step: int) -> str:
    module, _, call = name.partition("/")
    short = op.rpartition(".")[2] if call else ""
    only = f", layers: {layers}" if layers else ""
    target = f"list: [{short}]{only}" if short else f"modules: [{module.rpartition('.')[2]}]{only}"
    return {
        "nan": f"look at what goes into it: dump: {{level: L1, list: [{module}]}}, --msprobe-steps {step}",
        "inf": f"look at what goes into it: dump: {{level: L1, list: [{module}]}}, --msprobe-steps {step}",
        "wrong": f"repair it and see whether the loss follows: perturb: {{handler: fix, {target}}}",
        "nondeterministic": f"see that it is so every time: perturb: {{mode: no_change, {target}}}; then use a"
        " deterministic kernel",
        "fragile": f"compute it in higher precision: perturb: {{handler: fix, {target}}}",
        "odd": "compare its code with that of another layer; repair it with perturb: {handler: fix, modules:"
        f" [{module}], twin: sibling}}",
    }.get(verdict, f"see whether it is wrong or only over msprobe's threshold: perturb: {{profile: ulp, {target}}}")


def _place(name: str) -> str:
    return _LAYER.sub(r"\1layers.*", name, count=1)


def _read(extra: Any) -> dict[str, Any]:
    try:
        value = json.loads(extra)
    except (TypeError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
