"""The verdict on a single run: first non-finite value, replicas that disagree, alerts, suspects, incomplete record.

Each finding states what was seen, which tensor shows it, and the command to run next. `in_order` is the other half of
the verdict: silence says nothing about a feature that was off, so each feature that was on reports how much it checked.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from msprobe_megatron.analysis.diagnose.diagnose import diagnose
from msprobe_megatron.analysis.diagnose.suspects import Anomaly, Suspect, anomalies, suspects
from msprobe_megatron.analysis.laws.law import Breach, Law
from msprobe_megatron.analysis.laws.registry import examine
from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.analysis.page.table import RunView


@dataclass(frozen=True)
class PageFinding:
    """One finding. `tone` is good, bad or note; `key` is the series that shows it, `command` is to run next."""

    tone: str
    title: str
    text: str
    command: str = ""
    key: str = ""
    step: int | None = None
    facts: tuple[tuple[str, str], ...] = ()
    """Label and value of each detail."""
    then: str = ""
    """Advice for after the command."""


@dataclass(frozen=True)
class PageVerdict:
    """The headline of a run and the findings it is based on."""

    tone: str
    headline: str
    findings: list[PageFinding] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Steps worth a closer look."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a page."""
        return asdict(self)


def verdict_of(view: RunView, replicas: dict[str, Any], warnings: Collection[str]) -> PageVerdict:
    """The verdict on a single run: problems first, then gaps of the record, then what was checked and is in order."""
    reported, suspected = anomalies(view.run), suspects(view.run)
    ((since,),) = view.ask("select min(step) from run_rows where n_nan + n_posinf + n_neginf > 0")
    path = shlex.quote(str(view.run.path))
    unused = None if since is None else _unused(view, path)
    matters = None if unused is not None else since
    problems = list(_problems(view, matters, replicas, reported, suspected, path))
    gaps = _incomplete([text for text in warnings if not any(event.repeats(text) for event in reported)], path)
    heads = [head for head, _ in (*problems, *gaps)]
    findings = [finding for _, finding in (*problems, *gaps)]
    calm = in_order(
        view,
        finite=since is None,
        alike=not replicas["total"],
        alerts=len(reported),
        suspects=len(suspected),
    )
    if calm:
        next_command = f"msprobe-megatron report {path} --against GOLDEN" if view.run.files and not heads else ""
        findings.append(PageFinding("good", "In order", calm, next_command))
    findings += unused or []
    if not findings:
        return _nothing_recorded(path)
    tone = "bad" if problems else "note" if gaps else "good"
    healthy = f"Healthy as far as {'recorded' if view.run.files else 'examined'}"
    steps = [finding.step for _, finding in problems if finding.step is not None]
    return PageVerdict(tone, heads[0] if heads else healthy, findings, steps)


def _problems(
    view: RunView,
    since: int | None,
    replicas: dict[str, Any],
    reported: list[Anomaly],
    suspected: list[Suspect],
    path: str,
) -> Iterator[tuple[str, PageFinding]]:
    """Headline and finding of each kind of problem, most important first."""
    if since is not None:
        yield _non_finite(view, int(since))
    if replicas["total"]:
        yield _replicas(replicas, path)
    if reported:
        yield _alerts(reported, f"msprobe-megatron diagnose {path}")
    broken = _broken(view.run, apart=bool(replicas["total"]), finite=since is None)
    if broken:
        yield _laws(broken, f"msprobe-megatron diagnose {path}")
    if suspected:
        yield _suspects(suspected, f"msprobe-megatron diagnose {path}")


def _incomplete(warnings: list[str], path: str) -> list[tuple[str, PageFinding]]:
    if not warnings:
        return []
    text = "; ".join(warnings[:3]) + ("; …" if len(warnings) > 3 else "")
    finding = PageFinding("note", "The record is incomplete", text, f"msprobe-megatron summary {path}")
    return [("Recorded with warnings", finding)]


def _unused(view: RunView, path: str) -> list[PageFinding] | None:
    """Notes on values that reached neither the loss nor a gradient; None if there are others, or only a monitor saw."""
    bad = view.ask("select distinct step, kind from run_rows where n_nan + n_posinf + n_neginf > 0")
    if any(kind != "activation" or step not in view.run.dumped_steps for step, kind in bad):
        return None
    found = diagnose(view.run)
    if any(entry.what == "non_finite" for entry in found.findings):
        return None
    command = f"msprobe-megatron diagnose {path}"
    title = "Non-finite values that nothing used"
    return [PageFinding("note", title, note.text, command) for note in found.notes]


def _nothing_recorded(path: str) -> PageVerdict:
    text = "The run directory describes how the job was set up, but contains no rows, no verdicts and no events."
    finding = PageFinding("note", "Nothing to show", text, f"msprobe-megatron summary {path}")
    return PageVerdict("note", "Nothing was recorded", [finding])


def _non_finite(view: RunView, step: int) -> tuple[str, PageFinding]:
    """The diagnosis of that step: its first non-finite value."""
    command = f"msprobe-megatron diagnose {shlex.quote(str(view.run.path))} --step {step}"
    (names,) = view.ask("select count(distinct name) from run_rows where n_nan + n_posinf + n_neginf > 0")[0]
    title, spread = "First non-finite value", f"{names:,} name{'s' * (names != 1)} in the whole run"
    found = next((entry for entry in diagnose(view.run, step).findings if entry.what == "non_finite"), None)
    if found is None:  # kinds that only a monitor sees
        query = "select name, kind, rank from run_rows where step = ? and n_nan + n_posinf + n_neginf > 0 order by seq"
        name, kind, rank = view.ask(query, [step])[0]
        known = (("tensor", f"{name} {kind}"), ("when", f"step {step}"), ("ranks", f"{rank}"), ("affected", spread))
        text = f"The first tensor that holds one is the {kind} of {name}."
        return f"Non-finite since step {step} in {name}", PageFinding(
            "bad", title, text, command, step=step, facts=known
        )
    where = found.where
    facts = (
        ("tensor", f"{where['name']} {_tensor_label(where)}"),
        ("holds", f"{where['holds']} in {where['numel']:,} elements"),
        ("when", _when(where)),
        ("ranks", few(where["ranks"])),
        ("confidence", found.sure),
        ("affected", spread),
    )
    key = "|".join(str(where[name]) for name in ("kind", "name", "io", "path", "phase"))
    kinds = " and ".join(word for word in ("NaN", "Inf") if word in where["holds"]) or "on some replicas only"
    place = where["module"] if where["source"] == "operator" else where["name"]
    head = f"Non-finite ({kinds}) since step {step} in {place}"
    return head, PageFinding("bad", title, where["words"], command, key, step, facts, found.next)


def _tensor_label(where: Mapping[str, Any]) -> str:
    words = {"activation": where["io"], "gradient": f"gradient of the {where['io']}", "parameter": "(weight)"}
    return f"{words.get(where['kind'], where['kind'])} {where.get('path', '')}".strip()


def _when(where: Mapping[str, Any]) -> str:
    parts = [f"step {where['step']}", "" if where["microbatch"] is None else f"microbatch {where['microbatch']}"]
    return ", ".join(part for part in (*parts, where["phase"]) if part)


def _replicas(replicas: dict[str, Any], path: str) -> tuple[str, PageFinding]:
    first = replicas["first"][0]
    step = int(first["step"])
    held = [f"norm {group['norm']} on ranks {few(group['ranks'])}" for group in first["groups"][:3]]
    facts = (
        ("tensor", f"{first['name']} {_tensor_label(first)}"),
        ("when", f"step {step}" + ("" if first["microbatch"] is None else f", microbatch {first['microbatch']}")),
        ("values", "; ".join(held)),
        ("affected", f"{replicas['names']:,} name{'s' * (replicas['names'] != 1)}"),
    )
    text = "Ranks that should hold identical values differ. From here on they train different models."
    command = f"msprobe-megatron diagnose {path} --step {step}"
    finding = PageFinding("bad", "Replicas disagree", text, command, first["key"], step, facts)
    return f"Replicas disagree since step {step}: {first['name']}", finding


def _alerts(found: list[Anomaly], command: str) -> tuple[str, PageFinding]:
    """The first alert in causal order, and how many there are."""
    first = found[0]
    event = first.event
    more = f" {len(found) - 1} more follow." if len(found) > 1 else ""
    step = event.get("step")
    what = str(event.get("rule", event.get("event")))
    name = f" in {event['name']}" if event.get("name") else ""
    at = int(step) if isinstance(step, int) else None
    finding = PageFinding("bad", "Alerts", f"{first.text}.{more}", command, event_key(event), at)
    if what == "replica":
        return f"Ranks disagree since step {step}{name}", finding
    return f"Alert since step {step}: {what}{name}", finding


def event_key(event: Mapping[str, Any]) -> str:
    """Key of the series that an event is about.

    Example::

        >>> event_key({"kind": "loss", "name": "lm loss", "io": "output", "path": "0", "phase": "forward"})
        'loss|lm loss|output|0|forward'
    """
    return "|".join(str(event.get(name, "")) for name in ("kind", "name", "io", "path", "phase"))


def _broken(run: Run, *, apart: bool, finite: bool) -> list[tuple[Law, Breach]]:
    """Laws that are broken; not those that replicas or a NaN, which are told already, break with them."""
    if not finite:
        return []
    return [entry for entry in examine(run).broken if not (apart and entry[0].name.startswith("replica"))]


def _laws(broken: list[tuple[Law, Breach]], command: str) -> tuple[str, PageFinding]:
    """The first law that is broken, in order of cause, and the names of the others."""
    law, breach = broken[0]
    others = [other.name for other, _ in broken[1:]]
    more = f" Also broken: {', '.join(others)}." if others else ""
    step = breach.where.get("step")
    at = int(step) if isinstance(step, int) else None
    facts = (("law", law.says), ("how sure", breach.sure))
    finding = PageFinding("bad", f"Law broken: {law.name}", f"{breach.text}.{more}", command, "", at, facts, law.next)
    return f"Law broken: {law.name} in {breach.where.get('name', 'the run')}", finding


def _suspects(found: list[Suspect], command: str) -> tuple[str, PageFinding]:
    """The worst operator that perturb found, and advice."""
    first = found[0]
    more = f" {len(found) - 1} more follow." if len(found) > 1 else ""
    text = f"{first.text}.{more}"
    finding = PageFinding(
        "bad", "Suspect operators", text, command, facts=(("confidence", first.sure),), then=first.next
    )
    return f"Suspect operator: {first.name}", finding


def few(ranks: list[int]) -> str:
    """The first eight ranks, for a sentence.

    Example::

        >>> few([0, 2])
        '0, 2'
    """
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def in_order(view: RunView, *, finite: bool, alike: bool, alerts: int, suspects: int) -> str:
    """What was checked and is in order, as one sentence; empty if nothing was checked or nothing is in order."""
    found = [*_tensors(view, finite, alike)]
    if not suspects:
        found += _examined(view.run)
    if not alerts:
        found += [*_compared(view.run), *_watched(view.run)]
    if not found:
        return ""
    steps, ranks = len(view.run.steps), len({rank for _, rank, _ in view.run.files} or view.run.ranks)
    recorded = f"{steps} step{'s' * (steps != 1)}, " if steps else ""
    return f"{recorded}{ranks} rank{'s' * (ranks != 1)}: {', '.join(found)}."


def _tensors(view: RunView, finite: bool, alike: bool) -> Iterator[str]:
    (tensors, copies) = view.ask("select count(*), count(*) filter (copies > 1) from whole")[0]
    if finite and tensors:
        yield f"no NaN and no Inf in {tensors:,} tensors"
    if alike and copies:
        yield f"replicas agree on all {copies:,} replicated tensors"


def _examined(run: Run) -> Iterator[str]:
    if run.perturb:
        checks, names = run.perturb_rows().aggregate("count(*), count(distinct name)").fetchall()[0]
        yield f"no suspect in {checks:,} check{'s' * (checks != 1)} of {names:,} operator{'s' * (names != 1)}"


def _compared(run: Run) -> Iterator[str]:
    checks = _ledgers(run, "checks")
    times = max((int(entry.get("compared") or 0) for entry in checks), default=0)
    if times:
        labels = ", ".join(dict.fromkeys(label for entry in checks for label in entry.get("groups", {})))
        yield f"replicas identical in {times:,} comparison{'s' * (times != 1)} ({labels})"


def _watched(run: Run) -> Iterator[str]:
    rules = dict.fromkeys(str(rule) for entry in _ledgers(run, "alerts") for rule in entry.get("asked") or ())
    if rules:
        yield f"no alert ({', '.join(rules)})"
    recorders = _ledgers(run, "recorder")
    if recorders and not any(entry.get("written") for entry in recorders):
        yield "the flight recorder was not triggered"


def _ledgers(run: Run, part: str) -> list[dict[str, Any]]:
    """The ledger entries of one feature, of all ranks that have them."""
    found = [facts.get("ledger", {}).get(part) for facts in run.ranks.values()]
    return [entry for entry in found if isinstance(entry, dict)]
