"""The thread of the checks: brings digests to the other ranks of a group, compares, and tells what it found.

It works off what the training thread has taken, in order; what it cannot keep up with is dropped and counted. A rank
that does not answer is waited for here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from msprobe_megatron.bulletin import Bulletin, Missing
from msprobe_megatron.collective_checks import Exchanged
from msprobe_megatron.exchanging_collectives import Communication, Figures
from msprobe_megatron.parts import Job
from msprobe_megatron.probes.agreement import Disagreement, Words, compare, folded, safe, same_own, untiled
from msprobe_megatron.record.checks import CheckBatch
from msprobe_megatron.record.slots import SealedSlots

PENDING = 6
"""Checks that may be under way; fewer than the ring of the bulletin has places."""
PATIENCE, LAST_PATIENCE = 60.0, 10.0
"""Seconds that another rank is waited for while training goes on, and when this one is at its end."""
Tell = Callable[[dict[str, Any]], None]


class Member(NamedTuple):
    """What this rank brings to a group: (kind, name, slot) of digests, words known at once, a state of its own."""

    label: str
    ranks: tuple[int, ...]
    entries: list[tuple[str, str, int]]
    words: dict[str, int]
    own: int
    names: frozenset[str] = frozenset()
    """Parameters that the group shares, compared or not."""


class Taken(NamedTuple):
    """What the training thread took at one check."""

    number: int
    step: int
    slots: SealedSlots
    members: list[Member]
    ranges: dict[str, tuple[int, int, int]] | None
    exchanged: Exchanged | None = None


class Comparer:
    """Compares with the other ranks, in a daemon thread.

    Example::

        comparer = Comparer(job, store, alerting.disagreement)
        comparer.take(taken)
        comparer.close()
    """

    def __init__(self, job: Job, store: Any, tell: Tell) -> None:
        self._job, self._tell = job, tell
        self._board = Bulletin(store, f"msprobe/checks/{job.directory.path.name}", job.where.rank, self._hurried)
        self._communication = Communication(self._board, job.where.rank, self._missed)
        self._queue: deque[Taken] = deque()
        self._changed = threading.Condition()
        self._closing = self._busy = False
        self._deadline = float("inf")
        self._known: set[tuple[str, str, str]] = set()
        self.counts: Counter[str] = Counter()
        self._missing: dict[str, str] = {}
        self._fault = ""
        self._thread = threading.Thread(target=self._run, name="msprobe-checks", daemon=True)
        self._thread.start()

    def take(self, taken: Taken) -> None:
        """Compare this when its digests have arrived; never waits."""
        with self._changed:
            if len(self._queue) >= PENDING or self._fault:
                self.counts["dropped"] += 1
                return
            self._queue.append(taken)
            self._changed.notify_all()

    def close(self) -> None:
        """Compare what is under way, as long as the others answer, and then let them finish too."""
        with self._changed:
            self._closing, self._deadline = True, time.monotonic() + LAST_PATIENCE
            self._changed.notify_all()
        self._thread.join(LAST_PATIENCE + 5)

    def ledger(self) -> dict[str, Any]:
        """How many checks were made, agreed, disagreed; who did not answer."""
        return {**self.counts, "missing": dict(list(self._missing.items())[:20]), "fault": self._fault}

    def _hurried(self) -> bool:
        return time.monotonic() >= self._deadline

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    break
                taken = self._queue.popleft()
            try:
                self._check(taken)
            except Exception as error:  # the store is gone, above all; training must not notice
                self._fault = f"{type(error).__name__}: {error}"
                self._job.say(f"checks are off: {self._fault}", "check_fault")
                return
        with contextlib.suppress(Exception):
            self._leave_together()

    def _leave_together(self) -> None:
        """Rank 0 holds the store: it goes last."""
        self._board.post("done", 0, b"")
        if self._job.where.rank == 0:
            others = [rank for rank in range(self._job.where.world) if rank in self._job.config.ranks.ranks]
            self._board.read_all("done", 0, others, self._deadline)

    def _check(self, taken: Taken) -> None:
        floats, counts = taken.slots.wait()
        numbered = taken.slots.numbered()
        digests = safe(numbered[0], counts[:, 0]) if numbered is not None else np.zeros(0, np.uint64)
        figures = Figures(floats, counts, digests)
        vectors = [_words(member, figures) for member in taken.members]
        for member, vector in zip(taken.members, vectors, strict=True):
            self._board.post(f"{member.label}/fold", taken.number, folded(vector, member.own))
            if self._job.where.rank == member.ranks[0]:
                self._board.post(f"{member.label}/vector", taken.number, vector.tobytes())
        if taken.ranges is not None:
            self._board.post("ranges", taken.number, json.dumps(taken.ranges).encode())
        if taken.exchanged is not None:
            self._communication.post(taken.number, taken.exchanged, figures)
        found: list[dict[str, Any]] = []
        for member, vector in zip(taken.members, vectors, strict=True):
            try:
                found += self._compare(taken, member, vector)
                self.counts["compared"] += 1
            except Missing as error:
                self._missed(member.label, str(error))
        if taken.exchanged is not None:
            until = time.monotonic() + PATIENCE
            told = self._communication.check(taken.number, taken.exchanged, figures, until)
            found += [_complete(taken, event) for event in told if self._new(event["group"], "comm", event["name"])]
            self.counts["collectives"] += 1
        for event in found:
            self._tell(event)
        if found:
            self._job.submit(CheckBatch(taken.step, taken.number, tuple(found)))

    def _missed(self, label: str, text: str) -> None:
        self.counts["missed"] += 1
        if label not in self._missing:
            self._job.say(f"checks: {label}: not compared: {text}", "check_missing")
        self._missing[label] = text

    def _compare(self, taken: Taken, member: Member, vector: Words) -> list[dict[str, Any]]:
        rank, until = self._job.where.rank, time.monotonic() + PATIENCE

        def read(topic: str, other: int) -> bytes:
            return self._board.read(f"{member.label}/{topic}", taken.number, other, until)

        found = []
        differing = compare(vector, member.own, rank, member.ranks, read)
        if differing is not None:
            event = self._event(taken, member, differing)
            found += [event] if event is not None else []
        if (
            member.own
            and same_own(member.own, rank, member.ranks, read)
            and self._new(member.label, "check", "generators")
        ):
            text = f"ranks {[member.ranks[0], rank]} draw the same random numbers where each should draw its own"
            found.append(_event(taken, member, "rng", "model-parallel-rng", [member.ranks[0], rank], text, 0))
        if taken.ranges is not None and member.label in ("dp-cp", "edp") and rank == member.ranks[0]:
            found += self._tiles(taken, member, until)
        return found

    def _event(self, taken: Taken, member: Member, differing: Disagreement) -> dict[str, Any] | None:
        names = [*((kind, name) for kind, name, _ in member.entries), *(("check", name) for name in member.words)]
        differing_names = [names[place] for place in differing.places] or [("check", "what there is to compare")]
        new = [(kind, name) for kind, name in differing_names if self._new(member.label, kind, name)]
        if not new:
            return None
        kind, name = new[0]
        others = f"; {len(new) - 1} more" if len(new) > 1 else ""
        who = f"ranks {differing.odd}" if differing.odd != differing.ranks else f"ranks {differing.ranks}"
        of = f" of {differing.ranks}" if differing.odd != differing.ranks else ""
        text = f"{name} ({kind}) is not the same on {who}{of} ({member.label}){others}"
        return _event(taken, member, "replicas", name, differing.odd, text, len(new) - 1, kind)

    def _new(self, label: str, kind: str, name: str) -> bool:
        """Whether this was not told before: what has come apart stays apart."""
        key = (label, kind, name)
        if key in self._known:
            return False
        self._known.add(key)
        return True

    def _tiles(self, taken: Taken, member: Member, until: float) -> list[dict[str, Any]]:
        """Whether the shards of all optimizers of a group put together are every parameter once."""
        posted = self._board.read_all("ranges", taken.number, member.ranks, until)
        shards: dict[str, list[tuple[int, int]]] = {}
        sizes: dict[str, int] = {}
        for content in posted.values():
            for name, (start, stop, numel) in json.loads(content).items():
                shards.setdefault(name, []).append((start, stop))
                sizes[name] = numel
        wrong = {name: untiled(parts, sizes[name]) for name, parts in shards.items() if name in member.names}
        found = [(name, text) for name, text in wrong.items() if text is not None]
        if not found:
            return []
        others = f"; {len(found) - 1} more" if len(found) > 1 else ""
        text = f"optimizer shards of {found[0][0]} do not tile it: {found[0][1]} ({member.label}){others}"
        return [_event(taken, member, "optimizer", found[0][0], list(member.ranks), text, len(found) - 1)]


def _words(member: Member, figures: Figures) -> Words:
    known = np.array([word & (1 << 64) - 1 for word in member.words.values()], np.uint64)
    return np.concatenate((figures.words([slot for _, _, slot in member.entries]), known))


def _event(
    taken: Taken, member: Member, check: str, name: str, ranks: list[int], text: str, others: int, kind: str = "check"
) -> dict[str, Any]:
    found = {"check": check, "group": member.label, "ranks": ranks, "members": list(member.ranks), "name": name}
    return _complete(taken, {**found, "kind": kind, "others": others, "text": text})


def _complete(taken: Taken, event: dict[str, Any]) -> dict[str, Any]:
    io = "weight" if event["kind"] in ("parameter", "grad_reduced") else ""
    return {
        **event,
        **{"step": taken.step, "io": io, "path": "", "microbatch": None, "phase": "optimizer"},
        "value": float(event["others"] + 1),
        "text": f"replica: {event['text']} (step {taken.step})",
    }
