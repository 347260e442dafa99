"""The anomalies of a run in order of cause: what alerts and checks of all ranks said, earliest first.

Ranks write their events as they find them. What caused what follows from the step, the microbatch, the phase, the place
in the pipeline (down the stages in the forward, up again in the backward) and the order of execution on the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msprobe_megatron.analyse.load import Run
from msprobe_megatron.record.events import read_events

_EVENTS = ("alert", "nonfinite", "check")
_PHASES = {"forward": 0, "recompute": 1, "backward": 2, "optimizer": 3}
SAME = ("step", "event", "rule", "kind", "name", "io", "path", "microbatch", "phase")
"""What is alike in the events of several ranks that tell of one thing."""
_UNKNOWN = 1 << 40


@dataclass(frozen=True)
class Anomaly:
    """One event, and all ranks that told of it. `samples` are numbers in the order of consumption, first and last."""

    event: dict[str, Any]
    ranks: list[int]
    samples: tuple[int, int] | None

    @property
    def text(self) -> str:
        """In words, with the samples where they are known."""
        event = self.event
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks}"
        text = f"step {event.get('step')}, {who}: {event.get('text', event.get('event'))}"
        if self.samples is not None and event.get("kind") == "loss":
            digests = ", ".join(f"{name} {digest}" for name, digest in event.get("data", {}).items())
            text += f"; samples {self.samples[0]}-{self.samples[1]} in order of consumption"
            text += f" ({digests})" if digests else ""
        return text

    def tells(self, warning: str) -> bool:
        """Whether a warning about the run says the same once more."""
        text = str(self.event.get("text", ""))
        return bool(text) and text in warning

    def where(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        keys = ("step", "rank", "rule", "microbatch", "phase", "kind", "name", "io", "path", "value", "data", "group")
        found = {key: self.event[key] for key in keys if key in self.event}
        return {**found, "ranks": self.ranks, **({"samples": list(self.samples)} if self.samples is not None else {})}


def anomalies(run: Run) -> list[Anomaly]:
    """All anomalies, causes before what they can cause; what several ranks said of one tensor is one.

    Example::

        anomalies(open_run("probe_out"))[0].text
    """
    events = [event for event in read_events(run.path) if event.get("event") in _EVENTS]
    grouped: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    places = {rank: facts.get("coordinates", {}) for rank, facts in run.ranks.items()}
    for event in sorted(events, key=lambda event: order_of(event, places)):
        grouped.setdefault(tuple(repr(event.get(key)) for key in SAME), []).append(event)
    found = []
    for same in grouped.values():
        told = {rank for event in same for rank in (event.get("ranks") or [event.get("rank")]) if isinstance(rank, int)}
        found.append(Anomaly(same[0], sorted(told) or [-1], _samples(same[0], run)))
    return found


def order_of(event: Mapping[str, Any], places: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    """Key to sort events by: step, weights before microbatches before what belongs to the whole step, and so on.

    `places` are the coordinates of every rank.

    Example::

        sorted(events, key=lambda event: order_of(event, {0: {"pp": 0, "pp_size": 2}, 1: {"pp": 1, "pp_size": 2}}))
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
    """The samples of a microbatch, by Megatron's order: microbatch, then data parallel rank, then row."""
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
