"""Diagnosis of one run alone: what is wrong with it, where it began, how sure that is, what to run next.

Looks for the first non-finite number in order of cause and says where it came from, for ranks that should hold the same
numbers and do not, for skipped steps, alerts, faults of the kit, and what was asked and did not happen.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analyse.anomalies import Anomaly, anomalies
from msprobe_megatron.analyse.judge import judge
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.match import Pairs, match
from msprobe_megatron.analyse.monitor_files import steps_of
from msprobe_megatron.analyse.order import causal_order, forward_places
from msprobe_megatron.analyse.ranks import RankFinder
from msprobe_megatron.analyse.source import NonFinite, first_non_finite, non_finite_counts
from msprobe_megatron.analyse.summary import warnings
from msprobe_megatron.analyse.suspects import suspects
from msprobe_megatron.analyse.tolerance import Scene, tolerances
from msprobe_megatron.topology.layers import layer_of

_SHOWN = 5
_ANOMALIES = 10


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `sure` is `certain`, `likely` or `possible`; `next` is a command or an advice."""

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

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


def diagnose(run: Run, step: int | None = None) -> Diagnosis:
    """Look at a run, or at one of its steps.

    Example::

        [finding.what for finding in diagnose(open_run("probe_out")).findings]
    """
    findings: list[Finding] = []
    tensors = 0
    if run.files:
        # A run matched with itself: every tensor merged, in the form that ordering and judging understand.
        pairs = match(run, run, step)
        tensors = len(pairs)
    if tensors:
        order = causal_order(pairs, forward_places(run))
        findings += [*_non_finite(run, pairs, order), *_replicas(run, pairs, order), *_loss_scale(run)]
    told = anomalies(run)
    findings += _events(run, told)
    findings += [
        Finding("suspect", found.text, found.sure, found.next, asdict(found))
        for found in suspects(run, step)[:_ANOMALIES]
    ]
    findings += [
        Finding("warning", text, "certain", f"msprobe-megatron patches {run.path}")
        for text in [text for text in warnings(run) if not any(anomaly.tells(text) for anomaly in told)][:_SHOWN]
    ]
    steps = run.steps or sorted({number for part in run.perturb for number in steps_of(part)})
    return Diagnosis(str(run.path), steps if step is None else [step], tensors, findings)


def _non_finite(run: Run, pairs: Pairs, order: npt.NDArray[np.int64]) -> list[Finding]:
    found = first_non_finite(run, pairs, order)
    if found is None:
        return []
    i = found.index
    finder = RankFinder(None, run, pairs, [i])
    ranks = finder.non_finite(i)
    name, step = str(pairs["name"][i]), int(pairs["step"][i])
    microbatch = None if np.isnan(float(pairs["microbatch"][i])) else int(pairs["microbatch"][i])
    at = f"step {step}" + ("" if microbatch is None else f", microbatch {microbatch}") + f", {pairs['phase'][i]}"
    text = (
        f"first non-finite number: {found.count} of {int(pairs['numel_l'][i])} elements of {_label(pairs, i)}"
        f" ({found.what}); {at}, ranks {ranks}. {found.origin.words}"
    )
    where = {
        "source": found.origin.source,
        "words": found.origin.words,
        "holds": found.what,
        "numel": int(pairs["numel_l"][i]),
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


def _next(run: Run, found: NonFinite, step: int) -> str:
    advice = {
        "weight": "look at the checkpoint or the update that wrote it: record the step before,"
        f" --msprobe-steps {max(step - 1, 0)}",
        "data": "look at the batch of that step and microbatch; the model is not at fault",
        "communication": "run again with another algorithm or link for that group, and compare:"
        f" msprobe-megatron compare {run.path} OTHER --step {step}",
    }
    return advice.get(
        found.origin.source,
        f"record this module alone with its inputs: dump.list: [{found.origin.module}], --msprobe-steps {step}",
    )


def _skipped(pairs: Pairs) -> list[Finding]:
    gradients = pairs["kind"] == "grad_reduced"
    bad = gradients & (non_finite_counts(pairs) > 0)
    steps = sorted({int(step) for step in pairs["step"][bad]})
    if not steps:
        return []
    text = (
        f"reduced gradients are not finite at steps {steps}: an optimizer with a loss scale skips them,"
        " any other writes NaN into the weights"
    )
    return [Finding("skipped_step", text, "certain", "see the first non-finite number", {"steps": steps})]


def _replicas(run: Run, pairs: Pairs, order: npt.NDArray[np.int64]) -> list[Finding]:
    judgement = judge(pairs, tolerances(pairs, Scene.of(run, run, pairs)))
    odd = [int(i) for i in order if judgement.replica[i]]
    if not odd:
        return []
    finder = RankFinder(None, run, pairs, odd[:1])
    first = odd[0]
    ranks = finder.ranks(first, replica=True, tolerance=float(judgement.tolerance[first]))
    step = int(pairs["step"][first])
    text = (
        f"ranks {ranks} should hold the same {_label(pairs, first)} and do not (step {step},"
        f" apart by {judgement.error[first]:.1e}); {len(odd)} tensors in all"
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


def _loss_scale(run: Run) -> list[Finding]:
    """A loss scale that fell between two recorded steps: steps were skipped for overflow."""
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
            f"the loss scale fell from {before:g} at step {a} to {after:g} at step {b}: steps between were skipped",
            "certain",
            f"record the steps between: --msprobe-steps {a}-{b}",
            {"steps": [a, b]},
        )
        for (a, before), (b, after) in zip(scales, scales[1:], strict=False)
        if before is not None and after is not None and after < before
    ]


def _events(run: Run, found: list[Anomaly]) -> list[Finding]:
    """What alerts and checks said, in order of cause."""
    shown = [
        Finding("alert", anomaly.text, "certain", _see(run, anomaly), anomaly.where()) for anomaly in found[:_ANOMALIES]
    ]
    if len(found) > len(shown):
        text = f"{len(found) - len(shown)} more alerts after those"
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
