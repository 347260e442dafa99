"""Two runs on one page: the verdict, states of all tensors, a map of the differences, settings that differ."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from typing import Any

from msprobe_megatron.analyse.compare import Comparison, Difference
from msprobe_megatron.analyse.env_diff import env_diff
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.view_findings import Finding, Verdict, few
from msprobe_megatron.analyse.view_heat import place_of, place_order
from msprobe_megatron.analyse.view_table import short

_WORST = {"agree": 0, "layout": 1, "only_left": 2, "only_right": 2, "inherited": 3, "diverged": 4}


def states(comparison: Comparison) -> dict[str, list[Any]]:
    """Worst state of each series: [state, first step that has it, largest error, its tolerance].

    Example::

        states(compare(golden, run))["activation|decoder|output||forward"][0]
    """
    found: dict[str, list[Any]] = {}
    if comparison.table is None:
        return found
    names = ("kind", "name", "io", "path", "phase", "step", "state", "error", "tolerance")
    for kind, name, io, path, phase, step, state, error, tolerance in zip(
        *(comparison.table.column(column).to_pylist() for column in names), strict=True
    ):
        key = f"{kind}|{name}|{io}|{path}|{phase}"
        now = found.get(key)
        if now is None or _WORST[state] > _WORST[now[0]]:
            found[key] = [state, int(step), short(error), short(tolerance)]
        elif state == now[0] and (error or 0) > (now[2] if now[2] is not None else math.inf):
            found[key] = [state, now[1], short(error), short(tolerance)]
    return found


def difference_map(comparison: Comparison) -> dict[str, Any] | None:
    """Heat map of layers by step: the largest error in units of its tolerance, and how many tensors differ.

    Example::

        difference_map(compare(golden, run))["kinds"]["activation"]["excess"][0]    # the first place, by step
    """
    if comparison.table is None:
        return None
    figures: dict[tuple[str, str, int], list[float]] = {}
    columns = ("name", "kind", "step", "state", "error", "tolerance")
    for name, kind, step, state, error, tolerance in zip(
        *(comparison.table.column(column).to_pylist() for column in columns), strict=True
    ):
        if state not in ("agree", "diverged", "inherited") or kind == "loss":
            continue
        entry = figures.setdefault((place_of(name), kind, int(step)), [0.0, 0.0])
        excess = (error or 0.0) / tolerance if tolerance else 0.0
        entry[0] = max(entry[0], excess if math.isfinite(excess) else 0.0)
        entry[1] += state != "agree"
    places = sorted({place for place, _, _ in figures}, key=place_order)
    kinds: dict[str, dict[str, list[list[Any]]]] = {}
    for (place, kind, step), (excess, differ) in figures.items():
        tables = kinds.setdefault(
            kind, {name: [[None] * len(comparison.steps) for _ in places] for name in ("excess", "bad")}
        )
        row, column = places.index(place), comparison.steps.index(step)
        tables["excess"][row][column], tables["bad"][row][column] = short(excess), int(differ)
    return {"names": places, "kinds": kinds}


def setup_differences(golden: Run, run: Run) -> list[dict[str, Any]]:
    """Arguments, environment, versions, sources, weights and data that differ, by effect; what only we set is left out.

    Example::

        setup_differences(golden, run)[0]["effect"]     # "optimizer"
    """
    return [
        {"name": entry.name, "golden": entry.left, "run": entry.right, "effect": entry.effect}
        for entry in env_diff(golden, run).settings
        if not entry.name.startswith("msprobe_")
    ]


def verdict_against(comparison: Comparison, alone: Verdict) -> Verdict:
    """The verdict on a run beside a golden one; what the run alone shows comes after it.

    Example::

        verdict_against(compare(golden, run), verdict_of(...)).headline
    """
    golden, run = shlex.quote(comparison.golden), shlex.quote(comparison.run)
    # "Put it beside a golden run" is no advice any more.
    calm = [replace(found, command="") if found.tone == "good" else found for found in alone.findings]
    alone = replace(alone, findings=calm)
    first = comparison.first_divergence
    if comparison.verdict == "agree":
        counts = comparison.counts
        text = f"{counts.get('agree', 0):,} tensors agree within what rounding explains."
        left_out = counts.get("layout", 0)
        if left_out:
            text += f" {left_out:,} could not be compared."
        head = "Agrees with the golden run" if alone.tone == "good" else f"Agrees with the golden run. {alone.headline}"
        good = Finding("good", "Same computation", text)
        return Verdict(alone.tone, head, [good, *alone.findings], alone.steps)
    if comparison.verdict == "incomparable" or first is None:
        odd = Finding("note", "Cannot be compared", comparison.reason)
        return Verdict(
            "bad" if alone.tone == "bad" else "note", "Cannot be compared", [odd, *alone.findings], alone.steps
        )
    finding = _divergence(first, f"msprobe-megatron compare {golden} {run} --step {first.step}")
    hints = [Finding("note", "Hint", text[:1].upper() + text[1:]) for text in comparison.hints]
    steps = [first.step, *alone.steps]
    # What arrives at a layer was made by nobody inside it, and "in decoder" would say nothing.
    where = first.module if not _arrives(first) else f"what arrives at {first.name}"
    head = f"Diverged at step {first.step} in {where}"
    return Verdict("bad", head, [finding, *hints, *alone.findings], steps)


def _arrives(first: Difference) -> bool:
    return first.module != first.name and first.name.endswith(f"layers.{first.layer}")


def _divergence(first: Difference, command: str) -> Finding:
    what = {"activation": first.io, "gradient": f"gradient of the {first.io}"}.get(first.kind, first.kind)
    times = first.error / first.tolerance if first.tolerance else math.inf
    over = f", {times:,.0f} times what rounding explains ({_figure(first.tolerance)})"
    when = f"step {first.step}" + ("" if first.microbatch is None else f", microbatch {first.microbatch}")
    facts = (
        ("tensor", f"{first.name} {what} {first.path}".strip()),
        ("when", f"{when}, {first.phase}"),
        ("who", f"rank{'s' * (len(first.ranks) != 1)} {few(first.ranks)}"),
        ("golden | this run", first.what.replace(" against ", " | ", 1)),
        ("relative error", f"{_figure(first.error)}{over if math.isfinite(times) else ''}"),
    )
    around = f" Look at {first.module}, which computes it." if first.module != first.name else ""
    if _arrives(first):
        around = " Look at how it gets there: the layer before it, and between stages the message."
    text = f"Everything before it agrees with the golden run. This is the first tensor that does not.{around}"
    key = f"{first.kind}|{first.name}|{first.io}|{first.path}|{first.phase}"
    return Finding("bad", "First divergence", text, command, key, first.step, facts)


def _figure(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "infinite"
