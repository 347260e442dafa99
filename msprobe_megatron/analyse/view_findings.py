"""The verdict on one run, in words: non-finite since when and where, replicas that disagree, an incomplete record.

Each finding says what was seen, which tensor shows it, and the command that looks closer.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from msprobe_megatron.analyse.anomalies import anomalies
from msprobe_megatron.analyse.diagnose import diagnose
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.suspects import suspects
from msprobe_megatron.analyse.view_table import View


@dataclass(frozen=True)
class Finding:
    """One thing to know. `tone` is good, bad or note; `key` is the series that shows it."""

    tone: str
    title: str
    text: str
    command: str = ""
    key: str = ""
    step: int | None = None


@dataclass(frozen=True)
class Verdict:
    """The headline of a run and what it rests on."""

    tone: str
    headline: str
    findings: list[Finding] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Steps worth a closer look."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a page."""
        return asdict(self)


def verdict_of(view: View, replicas: dict[str, Any], warnings: Collection[str]) -> Verdict:
    """What is to be said of one run.

    Example::

        verdict_of(view, disagreements(view), warnings(run)).headline
    """
    findings: list[Finding] = []
    heads: list[str] = []
    tone, steps = "good", []
    path = shlex.quote(str(view.run.path))
    ((since,),) = view.ask("select min(step) from run_rows where n_nan + n_posinf + n_neginf > 0")
    if since is not None:
        findings.append(_non_finite(view, int(since)))
        heads.append(f"Non-finite since step {since}")
        tone = "bad"
        steps.append(int(since))
    if replicas["total"]:
        first = int(replicas["steps"][0])
        findings.append(_replicas(replicas, f"msprobe-megatron diagnose {path} --step {first}"))
        heads.append(f"Replicas disagree since step {first}")
        tone = "bad"
        steps.append(first)
    for finding, head in (_alerts(view.run), _suspects(view.run)):
        if head:
            findings.append(finding)
            heads.append(head)
            tone = "bad"
            steps += [finding.step] if finding.step is not None else []
    told = anomalies(view.run)
    warnings = [text for text in warnings if not any(anomaly.tells(text) for anomaly in told)]
    if warnings:
        text = "; ".join(list(warnings)[:3]) + ("; …" if len(warnings) > 3 else "")
        findings.append(Finding("note", "The record is incomplete", text, f"msprobe-megatron summary {path}"))
        heads.append("Recorded with warnings")
        tone = "note" if tone == "good" else tone
    calm = _calm(view, since is not None, bool(replicas["total"]))
    next_command = "" if heads else f"msprobe-megatron report {path} --against GOLDEN"
    findings += [replace(calm, command=next_command)] if calm.text else []
    return Verdict(tone, heads[0] if heads else "Healthy as far as recorded", findings, steps)


def _non_finite(view: View, step: int) -> Finding:
    """What the diagnosis of that step says of its first non-finite number."""
    found = next(entry for entry in diagnose(view.run, step).findings if entry.what == "non_finite")
    where = found.where
    key = "|".join(str(where[name]) for name in ("kind", "name", "io", "path", "phase"))
    (names,) = view.ask("select count(distinct name) from run_rows where n_nan + n_posinf + n_neginf > 0")[0]
    what = found.text.removeprefix("first non-finite number: ")
    text = f"{what} How sure: {found.sure}. It reached {names} names. Next: {found.next}."
    command = f"msprobe-megatron diagnose {shlex.quote(str(view.run.path))} --step {step}"
    return Finding("bad", "First non-finite value", text, command, key, step)


def _replicas(replicas: dict[str, Any], command: str) -> Finding:
    first = replicas["first"][0]
    held = " against ".join(f"{group['norm']} on ranks {few(group['ranks'])}" for group in first["groups"][:3])
    words = {"parameter": "value", "activation": first["io"], "gradient": f"gradient of the {first['io']}"}
    what = words.get(first["kind"], first["kind"])
    text = (
        f"Ranks that should hold the same numbers do not, first in the {what} of {first['name']}: "
        f"norm {held}. {replicas['names']} names are concerned."
    )
    return Finding("bad", "Replicas disagree", text, command, first["key"], int(first["step"]))


def _alerts(run: Run) -> tuple[Finding, str]:
    """The first alert in order of cause, and how many there are."""
    found = anomalies(run)
    if not found:
        return Finding("good", "", ""), ""
    first = found[0]
    more = f" {len(found) - 1} more follow." if len(found) > 1 else ""
    step = first.event.get("step")
    what = str(first.event.get("rule", first.event.get("event")))
    command = f"msprobe-megatron diagnose {shlex.quote(str(run.path))}"
    text = f"{first.text}.{more}"
    at = int(step) if isinstance(step, int) else None
    return Finding("bad", "Alerts", text, command, "", at), f"Alert since step {step}: {what}"


def _suspects(run: Run) -> tuple[Finding, str]:
    """The worst operator that perturb found, and what to do about it."""
    found = suspects(run)
    if not found:
        return Finding("good", "", ""), ""
    first = found[0]
    more = f" {len(found) - 1} more are in the log." if len(found) > 1 else ""
    text = f"{first.text}. How sure: {first.sure}.{more} Next: {first.next}."
    command = f"msprobe-megatron diagnose {shlex.quote(str(run.path))}"
    return Finding("bad", "Suspect operators", text, command), f"Suspect operator: {first.name}"


def few(ranks: list[int]) -> str:
    """The first eight ranks, for a sentence.

    Example::

        >>> few([0, 2])
        '0, 2'
    """
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def _calm(view: View, bad: bool, replicas: bool) -> Finding:
    """What was looked at and found in order."""
    (tensors, copies) = view.ask("select count(*), count(*) filter (copies > 1) from whole")[0]
    steps, ranks = len(view.run.steps), len({rank for _, rank, _ in view.run.files})
    parts = []
    if not bad:
        parts.append(f"no NaN and no Inf in {tensors:,} tensors")
    if not replicas and copies:
        parts.append(f"replicas agree on all {copies:,} tensors that several ranks hold")
    if not parts:
        return Finding("good", "", "")
    what = f"{steps} step{'s' * (steps != 1)}, {ranks} rank{'s' * (ranks != 1)}"
    return Finding("good", "In order", f"{what}: {', '.join(parts)}.")
