"""Diagnosis of a single run: what is wrong, where it began, with which confidence, and what to run next.

Reports the first non-finite value in causal order and its origin, ranks that should hold identical values but differ,
skipped steps, alerts, faults of the kit, and requests that were not fulfilled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.match import Pairs, match
from msprobe_megatron.analysis.compare.verdict.causes import causal_order, forward_places
from msprobe_megatron.analysis.compare.verdict.differences import RankFinder
from msprobe_megatron.analysis.compare.verdict.judge import judge
from msprobe_megatron.analysis.compare.verdict.tolerance import Scene, tolerances
from msprobe_megatron.analysis.diagnose.nonfinite_origin import (
    FirstNonFinite,
    first_non_finite,
    holds,
    non_finite_counts,
)
from msprobe_megatron.analysis.diagnose.nonfinite_reach import Reach, sort_by_reach
from msprobe_megatron.analysis.diagnose.summary import expects_rows, warnings
from msprobe_megatron.analysis.diagnose.suspects import Anomaly, anomalies, suspects
from msprobe_megatron.analysis.laws.law import Breach, Law
from msprobe_megatron.analysis.laws.registry import examine
from msprobe_megatron.analysis.load.run import Run, RunError, steps_of
from msprobe_megatron.topology.layers import layer_of

_SHOWN = 5
_ANOMALIES = 10


@dataclass(frozen=True)
class Finding:
    """One problem. `sure` is `certain`, `likely` or `possible`; `next` is a command or a piece of advice."""

    what: str
    text: str
    sure: str
    next: str
    where: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `msprobe-megatron diagnose` shows, most important first."""

    path: str
    steps: list[int]
    tensors: int
    findings: list[Finding]
    laws: dict[str, str] = field(default_factory=dict)
    """Every law by name: `holds`, `broken`, or `not checked: needs …`."""
    notes: list[Finding] = field(default_factory=list)
    """What is no problem but may be taken for one."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


def diagnose(run: Run, step: int | None = None) -> Diagnosis:
    """Diagnose a run, or one of its steps."""
    findings: list[Finding] = []
    notes: list[Finding] = []
    tensors = 0
    if run.files:
        # The run matched with itself: merged tensors in the form that `causal_order` and `judge` take.
        pairs = match(run, run, step)
        tensors = len(pairs)
    if tensors:
        order = causal_order(pairs, forward_places(run))
        reach = sort_by_reach(pairs, order, non_finite_counts(pairs))
        findings += [*_non_finite(run, pairs, reach), *_replicas(run, pairs, order), *_loss_scale(run)]
        notes += _unused(pairs, reach)
    examined = examine(run, step)
    findings += _laws(examined.broken, findings)
    notes += _laws(examined.notes, findings)
    reported = anomalies(run)
    findings += _events(run, reported)
    findings += [
        Finding("suspect", found.text, found.sure, found.next, asdict(found))
        for found in suspects(run, step)[:_ANOMALIES]
    ]
    findings += [
        Finding("warning", text, "certain", f"msprobe-megatron patches {run.path}")
        for text in [text for text in warnings(run) if not any(anomaly.repeats(text) for anomaly in reported)][:_SHOWN]
    ]
    if not tensors and not run.perturb and expects_rows(run):
        if not findings:
            raise RunError(_nothing_seen(run, step))
        findings.append(Finding("warning", _nothing_seen(run, step), "certain", f"msprobe-megatron summary {run.path}"))
    steps = run.steps or sorted({number for part in run.perturb for number in steps_of(part)})
    return Diagnosis(str(run.path), steps if step is None else [step], tensors, findings, examined.states(), notes)


def _nothing_seen(run: Run, step: int | None) -> str:
    """Nothing to diagnose is no clean bill: the reason for it."""
    if step is not None:
        return f"{run.path}: no rows of step {step}; recorded steps: {run.steps or 'none'}; nothing was diagnosed"
    counts = [facts.get("ledger", {}).get("written", {}).get("steps_written", 0) for facts in run.ranks.values()]
    written = sum(count for count in counts if isinstance(count, int))
    lost = f"; its ranks report {written} written steps, whose directories are gone" if written else ""
    return f"{run.path}: no recorded step found{lost}; nothing was diagnosed"


def _unused(pairs: Pairs, reach: Reach) -> list[Finding]:
    """Non-finite values of steps whose loss and gradients are finite."""
    if not reach.unused:
        return []
    first, names = reach.unused[0], {str(pairs["name"][i]) for i in reach.unused}
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    text = (
        f"non-finite values that reached neither the loss nor a gradient of their step: {_label(pairs, first)}"
        f" ({holds(pairs, first)}){more}"
    )
    where = {"names": sorted(names), "step": int(pairs["step"][first]), "name": str(pairs["name"][first])}
    return [Finding("unused_non_finite", text, "certain", "nothing: the loss and all gradients are finite", where)]


def _non_finite(run: Run, pairs: Pairs, reach: Reach) -> list[Finding]:
    found = first_non_finite(run, pairs, reach.reached)
    if found is None:
        return []
    i = found.index
    finder = RankFinder(None, run, pairs, [i])
    ranks = finder.non_finite(i)
    name, step, numel = str(pairs["name"][i]), int(pairs["step"][i]), int(pairs.both("numel").left[i])
    microbatch = None if np.isnan(float(pairs["microbatch"][i])) else int(pairs["microbatch"][i])
    at = f"step {step}" + ("" if microbatch is None else f", microbatch {microbatch}") + f", {pairs['phase'][i]}"
    text = (
        f"first non-finite value: {found.count} of {numel} elements of {_label(pairs, i)}"
        f" ({found.what}); {at}, ranks {ranks}. {found.origin.words}"
    )
    where = {
        "source": found.origin.source,
        "words": found.origin.words,
        "holds": found.what,
        "numel": numel,
        "module": found.origin.module,
        "name": name,
        "io": str(pairs["io"][i]),
        "kind": str(pairs["kind"][i]),
        "path": str(pairs["path"][i]),
        "step": step,
        "microbatch": microbatch,
        "phase": str(pairs["phase"][i]),
        "layer": layer_of(name),
        "ranks": ranks,
        "site": finder.site(i),
        "affected": found.affected,
    }
    return [Finding("non_finite", text, found.origin.sure, _next(run, found, step), where), *_skipped(pairs)]


def _next(run: Run, found: FirstNonFinite, step: int) -> str:
    advice = {
        "weight": "check the checkpoint or the update that wrote it: record the previous step,"
        f" --msprobe-steps {max(step - 1, 0)}",
        "data": "inspect the batch of that step and microbatch; the model is not at fault",
        "communication": "rerun with another algorithm or network path for that group, and compare:"
        f" msprobe-megatron compare {run.path} OTHER --step {step}",
    }
    return advice.get(
        found.origin.source,
        f"record only this module, with its inputs: dump.list: [{found.origin.module}], --msprobe-steps {step}",
    )


def _skipped(pairs: Pairs) -> list[Finding]:
    gradients = pairs["kind"] == "grad_reduced"
    bad = gradients & (non_finite_counts(pairs) > 0)
    steps = sorted({int(step) for step in pairs["step"][bad]})
    if not steps:
        return []
    text = (
        f"reduced gradients are non-finite at steps {steps}: an optimizer with a loss scaler skips these steps,"
        " any other writes NaN into the weights"
    )
    return [Finding("skipped_step", text, "certain", "see the first non-finite value", {"steps": steps})]


def _replicas(run: Run, pairs: Pairs, order: npt.NDArray[np.int64]) -> list[Finding]:
    judgement = judge(pairs, tolerances(pairs, Scene.of(run, run, pairs)))
    # Calls of no module are numbered on each stage for itself: the same name is not the same call there.
    stages = run.sizes.get("pp", 1) > 1
    odd = [int(i) for i in order if judgement.replica[i] and not (stages and _of_no_module(str(pairs["name"][i])))]
    if not odd:
        return []
    finder = RankFinder(None, run, pairs, odd[:1])
    first = odd[0]
    ranks = finder.ranks(first, replica=True, tolerance=float(judgement.tolerance[first]))
    step = int(pairs["step"][first])
    text = (
        f"ranks {ranks} should hold identical values of {_label(pairs, first)} but differ (step {step},"
        f" relative error {judgement.error[first]:.1e}); {len(odd)} tensors in total"
    )
    where = {
        "name": str(pairs["name"][first]),
        "kind": str(pairs["kind"][first]),
        "io": str(pairs["io"][first]),
        "step": step,
        "ranks": ranks,
        "tensors": len(odd),
    }
    sure = "certain" if pairs["kind"][first] in ("parameter", "grad_reduced") else "likely"
    return [Finding("replicas", text, sure, f"msprobe-megatron compare GOLDEN {run.path} --step {step}", where)]


def _of_no_module(name: str) -> bool:
    return name.startswith("outside/")


def _laws(breaches: list[tuple[Law, Breach]], known: list[Finding]) -> list[Finding]:
    """Laws that are broken, or noted; replicas that disagree are told once."""
    told = {finding.what for finding in known}
    return [
        Finding("law", f"{law.name}: {breach.text}", breach.sure, law.next, {"law": law.name, **breach.where})
        for law, breach in breaches
        if not (law.name in ("replicas", "replicated-activations") and "replicas" in told)
    ]


def _loss_scale(run: Run) -> list[Finding]:
    """A loss scale that fell between two recorded steps: steps were skipped because of overflow."""
    scales = (
        run.rows()
        .filter("kind = 'loss' and name = 'loss_scale'")
        .aggregate("step, max(max) as scale", "step")
        .order("step")
        .fetchall()
    )
    return [
        Finding(
            "skipped_step",
            f"the loss scale fell from {before:g} at step {a} to {after:g} at step {b}: steps in between were skipped",
            "certain",
            f"record the steps in between: --msprobe-steps {a}-{b}",
            {"steps": [a, b]},
        )
        for (a, before), (b, after) in zip(scales, scales[1:], strict=False)
        if before is not None and after is not None and after < before
    ]


def _events(run: Run, found: list[Anomaly]) -> list[Finding]:
    """Alerts and failed checks, in causal order."""
    shown = [
        Finding("alert", anomaly.text, "certain", _see(run, anomaly), anomaly.where()) for anomaly in found[:_ANOMALIES]
    ]
    if len(found) > len(shown):
        text = f"{len(found) - len(shown)} more alerts follow"
        shown.append(Finding("alert", text, "certain", f"{run.path}/events.jsonl"))
    return shown


def _see(run: Run, anomaly: Anomaly) -> str:
    step = anomaly.event.get("step")
    if step in run.steps:
        return f"msprobe-megatron summary {run.path} --step {step}"
    return f"record that step: --msprobe-steps {step}"


def _label(pairs: Pairs, i: int) -> str:
    kind, io, name, path = (str(pairs[column][i]) for column in ("kind", "io", "name", "path"))
    what = {"activation": io, "gradient": f"gradient of {io}"}.get(kind, kind)
    return f"{name} {what}{' ' + path if path else ''}"
