"""The verdict on one run, in words: non-finite since when and where, replicas that disagree, an incomplete record.

Each finding says what was seen, which tensor shows it, and the command that looks closer.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from msprobe_megatron.analyse.anomalies import Anomaly, anomalies
from msprobe_megatron.analyse.diagnose import diagnose
from msprobe_megatron.analyse.suspects import Suspect, suspects
from msprobe_megatron.analyse.view_calm import in_order
from msprobe_megatron.analyse.view_table import View


@dataclass(frozen=True)
class Finding:
    """One thing to know. `tone` is good, bad or note; `key` is the series that shows it, `command` looks closer."""

    tone: str
    title: str
    text: str
    command: str = ""
    key: str = ""
    step: int | None = None
    facts: tuple[tuple[str, str], ...] = ()
    """What, when, who: a label and its value each."""
    then: str = ""
    """What to do after the command, in words."""


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
    told = anomalies(view.run)
    ((since,),) = view.ask("select min(step) from run_rows where n_nan + n_posinf + n_neginf > 0")
    path = shlex.quote(str(view.run.path))
    pairs = []
    if since is not None:
        pairs.append(_non_finite(view, int(since)))
    if replicas["total"]:
        pairs.append(_replicas(replicas, path))
    if told:
        pairs.append(_alerts(told, f"msprobe-megatron diagnose {path}"))
    found = suspects(view.run)
    if found:
        pairs.append(_suspects(found, f"msprobe-megatron diagnose {path}"))
    tone = "bad" if pairs else "good"
    heads, findings = [head for head, _ in pairs], [finding for _, finding in pairs]
    steps = [finding.step for finding in findings if finding.step is not None]
    warnings = [text for text in warnings if not any(anomaly.tells(text) for anomaly in told)]
    if warnings:
        text = "; ".join(list(warnings)[:3]) + ("; …" if len(warnings) > 3 else "")
        findings.append(Finding("note", "The record is incomplete", text, f"msprobe-megatron summary {path}"))
        heads.append("Recorded with warnings")
        tone = "note" if tone == "good" else tone
    calm = in_order(view, finite=since is None, alike=not replicas["total"], alerts=len(told), suspects=len(found))
    if calm:
        next_command = "" if heads else f"msprobe-megatron report {path} --against GOLDEN"
        findings.append(Finding("good", "In order", calm, next_command if view.run.files else ""))
    if not findings:
        text = "The directory tells how the job was set up, and holds no numbers, no verdicts and no events."
        nothing = Finding("note", "Nothing to look at", text, f"msprobe-megatron summary {path}")
        return Verdict("note", "Nothing was recorded", [nothing])
    well = f"Healthy as far as {'recorded' if view.run.files else 'examined'}"
    return Verdict(tone, heads[0] if heads else well, findings, steps)


def _non_finite(view: View, step: int) -> tuple[str, Finding]:
    """What the diagnosis of that step says of its first non-finite number."""
    command = f"msprobe-megatron diagnose {shlex.quote(str(view.run.path))} --step {step}"
    (names,) = view.ask("select count(distinct name) from run_rows where n_nan + n_posinf + n_neginf > 0")[0]
    title, spread = "First non-finite value", f"{names:,} name{'s' * (names != 1)} in the whole run"
    found = next((entry for entry in diagnose(view.run, step).findings if entry.what == "non_finite"), None)
    if found is None:  # kinds that only a monitor sees
        query = "select name, kind, rank from run_rows where step = ? and n_nan + n_posinf + n_neginf > 0 order by seq"
        name, kind, rank = view.ask(query, [step])[0]
        known = (("tensor", f"{name} {kind}"), ("when", f"step {step}"), ("who", f"rank {rank}"), ("reached", spread))
        text = f"The first that holds one is the {kind} of {name}."
        return f"Non-finite since step {step} in {name}", Finding("bad", title, text, command, step=step, facts=known)
    where = found.where
    facts = (
        ("tensor", f"{where['name']} {_words(where)}"),
        ("holds", f"{where['holds']} in {where['numel']:,} elements"),
        ("when", _when(where)),
        ("who", f"rank{'s' * (len(where['ranks']) != 1)} {few(where['ranks'])}"),
        ("how sure", found.sure),
        ("reached", spread),
    )
    key = "|".join(str(where[name]) for name in ("kind", "name", "io", "path", "phase"))
    kinds = " and ".join(word for word in ("NaN", "Inf") if word in where["holds"]) or "not on every rank"
    place = where["module"] if where["source"] == "operator" else where["name"]
    head = f"Non-finite ({kinds}) since step {step} in {place}"
    return head, Finding("bad", title, where["words"], command, key, step, facts, found.next)


def _words(where: Mapping[str, Any]) -> str:
    words = {"activation": where["io"], "gradient": f"gradient of the {where['io']}", "parameter": "(weight)"}
    return f"{words.get(where['kind'], where['kind'])} {where.get('path', '')}".strip()


def _when(where: Mapping[str, Any]) -> str:
    parts = [f"step {where['step']}", "" if where["microbatch"] is None else f"microbatch {where['microbatch']}"]
    return ", ".join(part for part in (*parts, where["phase"]) if part)


def _replicas(replicas: dict[str, Any], path: str) -> tuple[str, Finding]:
    first = replicas["first"][0]
    step = int(first["step"])
    held = [f"norm {group['norm']} on ranks {few(group['ranks'])}" for group in first["groups"][:3]]
    facts = (
        ("tensor", f"{first['name']} {_words(first)}"),
        ("when", f"step {step}" + ("" if first["microbatch"] is None else f", microbatch {first['microbatch']}")),
        ("values", "; ".join(held)),
        ("concerned", f"{replicas['names']:,} name{'s' * (replicas['names'] != 1)}"),
    )
    text = "Ranks that should hold the same numbers do not. From here on each of them trains another model."
    command = f"msprobe-megatron diagnose {path} --step {step}"
    finding = Finding("bad", "Replicas disagree", text, command, first["key"], step, facts)
    return f"Replicas disagree since step {step}: {first['name']}", finding


def _alerts(found: list[Anomaly], command: str) -> tuple[str, Finding]:
    """The first alert in order of cause, and how many there are."""
    first = found[0]
    event = first.event
    more = f" {len(found) - 1} more after it." if len(found) > 1 else ""
    step = event.get("step")
    what = str(event.get("rule", event.get("event")))
    name = f" in {event['name']}" if event.get("name") else ""
    at = int(step) if isinstance(step, int) else None
    finding = Finding("bad", "Alerts", f"{first.text}.{more}", command, event_key(event), at)
    if what == "replica":
        return f"Ranks disagree since step {step}{name}", finding
    return f"Alert since step {step}: {what}{name}", finding


def event_key(event: Mapping[str, Any]) -> str:
    """The series that an event is about.

    Example::

        >>> event_key({"kind": "loss", "name": "lm loss", "io": "output", "path": "0", "phase": "forward"})
        'loss|lm loss|output|0|forward'
    """
    return "|".join(str(event.get(name, "")) for name in ("kind", "name", "io", "path", "phase"))


def _suspects(found: list[Suspect], command: str) -> tuple[str, Finding]:
    """The worst operator that perturb found, and what to do about it."""
    first = found[0]
    more = f" {len(found) - 1} more after it." if len(found) > 1 else ""
    text = f"{first.text}.{more}"
    finding = Finding("bad", "Suspect operators", text, command, facts=(("how sure", first.sure),), then=first.next)
    return f"Suspect operator: {first.name}", finding


def few(ranks: list[int]) -> str:
    """The first eight ranks, for a sentence.

    Example::

        >>> few([0, 2])
        '0, 2'
    """
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
