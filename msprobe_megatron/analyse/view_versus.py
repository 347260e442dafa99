"""Two runs on one page: states of all tensors, the path that leads to the first divergence, arguments that differ."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from typing import Any

from msprobe_megatron.analyse.compare import Comparison, Difference
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.view_findings import Finding, Verdict, few
from msprobe_megatron.analyse.view_heat import place_of, place_order
from msprobe_megatron.analyse.view_table import short

_BEFORE, _AFTER = 7, 6
_WORST = {"agree": 0, "layout": 1, "only_left": 2, "only_right": 2, "inherited": 3, "diverged": 4}
_LAYOUT_ARGUMENTS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "world_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "data_parallel_size", "sequence_parallel"),
    *("num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size", "use_distributed_optimizer"),
    *("num_virtual_stages_per_pipeline_rank", "layers_per_chunk", "micro_batch_size", "num_microbatches"),
)
_NO_EFFECT = ("log_interval", "save_losses", "save", "tensorboard_dir", "train_iters", "rank", "local_rank")


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
            found[key] = [state, int(step), _error(error), short(tolerance)]
        elif state == now[0] and (error or 0) > (now[2] if now[2] is not None else math.inf):
            found[key] = [state, now[1], _error(error), short(tolerance)]
    return found


def flow(comparison: Comparison) -> list[dict[str, Any]]:
    """Tensors just before, at and after the first divergence, in order of cause, with both sides' figures.

    Example::

        [(entry["name"], entry["state"]) for entry in flow(compare(golden, run))]
    """
    first = comparison.first_divergence
    if first is None or comparison.table is None:
        return []
    rows = comparison.table.to_pylist()
    at = next((i for i, row in enumerate(rows) if _is(row, first)), None)
    if at is None:
        return []
    around = [i for i, row in enumerate(rows) if row["step"] == first.step and _together(row, rows[at])]
    here = around.index(at)
    return [_entry(rows[i], first=i == at) for i in around[max(0, here - _BEFORE) : here + _AFTER + 1]]


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


def _together(row: dict[str, Any], first: dict[str, Any]) -> bool:
    """Tensors of the same microbatch and direction: what the first divergence was computed from."""
    return row["state"] not in ("layout",) and all(
        row[name] == first[name] or _both_nan(row[name], first[name]) for name in ("microbatch", "kind")
    )


def _both_nan(left: Any, right: Any) -> bool:
    return isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)


def _is(row: dict[str, Any], first: Difference) -> bool:
    same = all(row[name] == getattr(first, name) for name in ("step", "name", "io", "path", "kind", "phase"))
    whole = row["microbatch"] is None or _both_nan(row["microbatch"], math.nan)
    return same and (whole if first.microbatch is None else row["microbatch"] == first.microbatch)


def _entry(row: dict[str, Any], *, first: bool) -> dict[str, Any]:
    sides = {
        side: {
            "norm": _norm(row[f"sumsq_{side}"]),
            "min": short(row[f"min_{side}"]),
            "max": short(row[f"max_{side}"]),
            "bad": _count(row, side),
        }
        for side in ("golden", "run")
    }
    words = {name: row[name] for name in ("kind", "name", "io", "path", "phase", "op", "state")}
    key = f"{row['kind']}|{row['name']}|{row['io']}|{row['path']}|{row['phase']}"
    return {
        **words,
        **sides,
        "key": key,
        "step": int(row["step"]),
        "microbatch": None if _both_nan(row["microbatch"], math.nan) else row["microbatch"],
        "error": _error(row["error"]),
        "tolerance": short(row["tolerance"]),
        "first": first,
    }


def _norm(sumsq: float | None) -> float | None:
    return short(math.sqrt(sumsq)) if sumsq is not None and sumsq >= 0 else None


def _count(row: dict[str, Any], side: str) -> int:
    values = [row[f"{name}_{side}"] for name in ("n_nan", "n_posinf", "n_neginf")]
    return sum(int(value) for value in values if value is not None and not math.isnan(value))


def _error(value: float | None) -> float | None:
    """None stands for an infinite error: the numbers of non-finite elements differ."""
    return short(value)


def argument_differences(golden: Run, run: Run) -> list[dict[str, Any]]:
    """Training arguments and versions that differ: those that change numbers first, then the layout, then the rest.

    Example::

        argument_differences(golden, run)[0]    # {"name": "lr", "golden": 0.001, "run": 0.01, "group": "numbers"}
    """
    found = []
    for section in ("arguments", "versions"):
        left, right = (side.facts.get(section) or {} for side in (golden, run))
        for name in sorted({*left, *right}):
            if left.get(name) == right.get(name) or name.startswith("msprobe_"):
                continue
            group = "numbers"
            if section == "versions":
                group = "versions"
            elif name in _LAYOUT_ARGUMENTS:
                group = "layout"
            elif name in _NO_EFFECT:
                group = "bookkeeping"
            found.append({"name": name, "golden": left.get(name), "run": right.get(name), "group": group})
    order = ("numbers", "versions", "layout", "bookkeeping")
    return sorted(found, key=lambda entry: (order.index(entry["group"]), entry["name"]))


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
    place = f"layer {first.layer}, " if first.layer is not None else ""
    where = f"step {first.step}" + ("" if first.microbatch is None else f", microbatch {first.microbatch}")
    what = {"activation": f"{first.io} of", "gradient": f"gradient of the {first.io} of"}.get(first.kind, first.kind)
    text = (
        f"First in the {what} {first.name} ({place}{where}, {first.phase}, ranks {few(first.ranks)}):"
        f" {first.what}. Relative error {_figure(first.error)}; rounding explains {_figure(first.tolerance)}."
        + (f" Look at {first.module}." if first.module != first.name else "")
    )
    found = Finding(
        "bad",
        "First divergence",
        text,
        f"msprobe-megatron compare {golden} {run} --step {first.step}",
        f"{first.kind}|{first.name}|{first.io}|{first.path}|{first.phase}",
        first.step,
    )
    hints = [Finding("note", "Hint", text) for text in comparison.hints]
    steps = [first.step, *alone.steps]
    return Verdict("bad", f"Diverged at step {first.step} in {first.module}", [found, *hints, *alone.findings], steps)


def _figure(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "infinite"
