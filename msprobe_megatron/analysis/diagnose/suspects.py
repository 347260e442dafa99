"""Anomalies of a run in causal order, and the operators that perturb suspects.

Ranks write events as they occur. Their causal order follows from the step, the microbatch, the phase, the pipeline
stage (ascending in the forward, descending in the backward) and the order of execution on the rank.

Suspects: one per operator and verdict, worst first, with a next step. NaN and Inf come before everything else, the
earliest first, because others inherit them. Then come certain verdicts, by how far they exceed their limit. Layers with
the same operator and the same verdict are one suspect.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.run_directory.directory import read_events
from msprobe_megatron.topology.layers import layer_of

_EVENTS = ("alert", "nonfinite", "check")
_PHASES = {"forward": 0, "recompute": 1, "backward": 2, "optimizer": 3}
SAME = ("step", "event", "rule", "kind", "name", "io", "path", "microbatch", "phase")
"""Fields that are equal in the events of several ranks about the same anomaly."""
_UNKNOWN = 1 << 40


@dataclass(frozen=True)
class Anomaly:
    """One event, and all ranks that reported it. `samples` are the first and last number in order of consumption."""

    event: dict[str, Any]
    ranks: list[int]
    samples: tuple[int, int] | None
    texts: frozenset[str] = frozenset()
    """What each of the ranks reported: their values may differ."""

    @property
    def text(self) -> str:
        """One line of text, with the samples where they are known."""
        event = self.event
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks}"
        text = f"step {event.get('step')}, {who}: {event.get('text', event.get('event'))}"
        if self.samples is not None and event.get("kind") == "loss":
            digests = ", ".join(f"{name} {digest}" for name, digest in event.get("data", {}).items())
            text += f"; samples {self.samples[0]}-{self.samples[1]} in order of consumption"
            text += f" ({digests})" if digests else ""
        return text

    def repeats(self, warning: str) -> bool:
        """True if a warning about the run reports the same anomaly."""
        return any(text in warning for text in self.texts)

    def where(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        keys = ("step", "rank", "rule", "microbatch", "phase", "kind", "name", "io", "path", "value", "data", "group")
        found = {key: self.event[key] for key in keys if key in self.event}
        return {**found, "ranks": self.ranks, **({"samples": list(self.samples)} if self.samples is not None else {})}


def anomalies(run: Run) -> list[Anomaly]:
    """All anomalies, causes before their possible effects; reports of several ranks about one tensor are one."""
    events = [event for event in read_events(run.path) if event.get("event") in _EVENTS]
    grouped: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    places = {rank: facts.get("coordinates", {}) for rank, facts in run.ranks.items()}
    for event in sorted(events, key=lambda event: order_of(event, places)):
        grouped.setdefault(tuple(repr(event.get(key)) for key in SAME), []).append(event)
    found = []
    for same in grouped.values():
        ranks = {
            rank for event in same for rank in (event.get("ranks") or [event.get("rank")]) if isinstance(rank, int)
        }
        texts = frozenset(text for event in same if (text := str(event.get("text", ""))))
        found.append(Anomaly(same[0], sorted(ranks) or [-1], _samples(same[0], run), texts))
    return found


def order_of(event: Mapping[str, Any], places: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    """Sort key of an event: step, then weights before microbatches before whole-step values, and so on.

    `places` are the coordinates of every rank.
    """
    phase = _PHASES.get(str(event.get("phase")), 3)
    microbatch = event.get("microbatch")
    whole = 0 if event.get("kind") == "parameter" else 1 if isinstance(microbatch, int) else 2
    place = places.get(_number(event.get("rank"), -1), {})
    stage = _number(event.get("vpp"), 0) * _number(place.get("pp_size"), 1) + _number(place.get("pp"), 0)
    return (
        _number(event.get("step"), _UNKNOWN),
        whole,
        _number(microbatch, 0),
        phase,
        -stage if phase == _PHASES["backward"] else stage,
        _number(event.get("seq"), _UNKNOWN),
    )


def _samples(event: dict[str, Any], run: Run) -> tuple[int, int] | None:
    """The samples of a microbatch, in Megatron's order: microbatch, then data-parallel rank, then row."""
    arguments = run.facts.get("arguments") or {}
    size, batch = arguments.get("micro_batch_size"), arguments.get("global_batch_size")
    place = run.ranks.get(_number(event.get("rank"), -1), {}).get("coordinates", {})
    known = (event.get("microbatch"), event.get("step"), size, batch, place.get("dp"))
    if not all(isinstance(value, int) for value in known) or arguments.get("rampup_batch_size"):
        return None
    microbatch, step, size, batch, dp = (int(value) for value in known if value is not None)
    first = step * batch + (microbatch * _number(place.get("dp_size"), 1) + dp) * size
    return first, first + size - 1


def _number(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


_LAYER = re.compile(r"(^|\.)layers\.\d+")
_WEIGHT = {"nan": 0, "inf": 0, "odd": 1, "wrong": 1, "nondeterministic": 2, "sign": 2, "changed": 3, "fragile": 4}
_SURE = {"nan": "certain", "inf": "certain", "nondeterministic": "certain", "wrong": "certain", "odd": "likely"}
_SHOWN_STEPS = 5


@dataclass(frozen=True)
class Suspect:
    """An operator with a verdict: its place, in how many of its checks it was found, and the worst statistics."""

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
    """The suspects of a run, or of one of its steps."""
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
    text = f"{name}{several}: {_words(verdict, figures)}; {stage}, {where}; found in {len(rows)} of {looks} checks"
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
    ulp = f"off by {float(figures['ulp']):.3g} ulp" if "ulp" in figures else ""
    limit = f"{float(figures['over']):.3g} times the limit of its class" if figures.get("over") else ""
    expected = f"expected: {figures['note']}" if figures.get("note") else ""
    return {
        "nan": "returns NaN where the exact operator does not",
        "inf": "returns Inf where the exact operator does not",
        "wrong": f"wrong: {', '.join(part for part in (ulp, limit, expected) if part)}",
        "nondeterministic": f"returns a different result for the same inputs ({ulp})",
        "fragile": f"amplifies a last-place change of its input {float(figures.get('kappa', 0)):.3g} times"
        f" (limit {float(figures.get('threshold', 0)):.3g})",
        "odd": str(figures.get("note", "uses a different constant than other layers")),
        "sign": "signs flip",
        "changed": f"changed by {figures.get('max_rel', figures.get('ulp'))} (threshold {figures.get('threshold')})",
    }.get(verdict, verdict)


def _next(run: Run, verdict: str, name: str, op: str, layers: list[int], step: int) -> str:
    module, _, call = name.partition("/")
    short = op.rpartition(".")[2] if call else ""
    only = f", layers: {layers}" if layers else ""
    target = f"list: [{short}]{only}" if short else f"modules: [{module.rpartition('.')[2]}]{only}"
    return {
        "nan": f"check its inputs: dump: {{level: L1, list: [{module}]}}, --msprobe-steps {step}",
        "inf": f"check its inputs: dump: {{level: L1, list: [{module}]}}, --msprobe-steps {step}",
        "wrong": f"correct it and check whether the loss recovers: perturb: {{handler: fix, {target}}}",
        "nondeterministic": f"confirm that it happens every time: perturb: {{mode: no_change, {target}}}; then use a"
        " deterministic kernel",
        "fragile": f"compute it in higher precision: perturb: {{handler: fix, {target}}}",
        "odd": "compare its code with that of another layer; correct it with perturb: {handler: fix, modules:"
        f" [{module}], twin: sibling}}",
    }.get(verdict, f"check whether it is wrong or only over msprobe's threshold: perturb: {{profile: ulp, {target}}}")


def _place(name: str) -> str:
    return _LAYER.sub(r"\1layers.*", name, count=1)


def _read(extra: Any) -> dict[str, Any]:
    try:
        value = json.loads(extra)
    except (TypeError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
