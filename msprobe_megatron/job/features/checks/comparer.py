"""The thread of the checks: exchanges digests with the other ranks of a group, compares, and reports the findings.

It processes what the training thread has taken, in order; what it cannot keep up with is dropped and counted. This is
the only place that waits for a rank that does not answer.
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

from msprobe_megatron.job.features.checks.collectives import CheckStats, Communication, Exchanged
from msprobe_megatron.job.features.checks.digests import Disagreement, Words, compare, folded, safe, same_own, untiled
from msprobe_megatron.job.features.feature import JobContext
from msprobe_megatron.job.record.check_files import CheckBatch
from msprobe_megatron.job.record.slots import SealedSlots
from msprobe_megatron.job.store import Bulletin, Missing, StoreChannel

PENDING = 6
"""Checks that may be queued; fewer than the ring of the bulletin holds."""
PATIENCE, LAST_PATIENCE = 60.0, 10.0
"""Seconds to wait for another rank while training runs, and when this rank is closing."""
Report = Callable[[dict[str, Any]], None]


class Member(NamedTuple):
    """What this rank contributes to a group: (kind, name, slot) of digests, values known at once, its own RNG state."""

    label: str
    ranks: tuple[int, ...]
    entries: list[tuple[str, str, int]]
    words: dict[str, int]
    own: int
    names: frozenset[str] = frozenset()
    """Parameters that the group shares, compared or not."""


class Snapshot(NamedTuple):
    """What the training thread has taken for one check."""

    number: int
    step: int
    slots: SealedSlots
    members: list[Member]
    ranges: dict[str, tuple[int, int, int]] | None
    exchanged: Exchanged | None = None


class Comparer:
    """Compares with the other ranks, in a daemon thread."""

    def __init__(self, job: JobContext, store: Any, report: Report) -> None:
        self._job, self._report = job, report
        channel = StoreChannel(job.directory.path, "checks", store)
        self._board = Bulletin(channel, job.where.rank, self._hurried)
        self._communication = Communication(self._board, job.where.rank, self._missed)
        self._queue: deque[Snapshot] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._deadline = float("inf")
        self._known: set[tuple[str, str, str]] = set()
        self.counts: Counter[str] = Counter()
        self._missing: dict[str, str] = {}
        self._fault = ""
        self._thread = threading.Thread(target=self._run, name="msprobe-checks", daemon=True)
        self._thread.start()

    def take(self, snapshot: Snapshot) -> None:
        """Queue a snapshot for comparison; never blocks."""
        with self._changed:
            if len(self._queue) >= PENDING or self._fault:
                self.counts["dropped"] += 1
                return
            self._queue.append(snapshot)
            self._changed.notify_all()

    def close(self) -> None:
        """Finish queued comparisons as long as the other ranks answer, and then let them finish too."""
        with self._changed:
            self._closing, self._deadline = True, time.monotonic() + LAST_PATIENCE
            self._changed.notify_all()
        self._thread.join(LAST_PATIENCE + 5)

    def ledger(self) -> dict[str, Any]:
        """How many checks were made and missed; which groups did not answer."""
        return {**self.counts, "missing": dict(list(self._missing.items())[:20]), "fault": self._fault}

    def _hurried(self) -> bool:
        return time.monotonic() >= self._deadline

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    break
                snapshot = self._queue.popleft()
            try:
                self._check(snapshot)
            except Exception as error:  # above all a store that is gone; training must not notice
                self._fault = f"{type(error).__name__}: {error}"
                self._job.say(f"checks are off: {self._fault}", "check_fault")
                return
        with contextlib.suppress(Exception):
            self._leave_together()

    def _leave_together(self) -> None:
        """Rank 0 hosts the store: it leaves last."""
        self._board.post("done", 0, b"")
        if self._job.where.rank == 0:
            others = [rank for rank in range(self._job.where.world) if rank in self._job.config.ranks.ranks]
            self._board.read_all("done", 0, others, self._deadline)

    def _check(self, snapshot: Snapshot) -> None:
        floats, counts = snapshot.slots.wait()
        numbered = snapshot.slots.numbered()
        digests = safe(numbered[0], counts[:, 0]) if numbered is not None else np.zeros(0, np.uint64)
        stats = CheckStats(floats, counts, digests)
        vectors = [_words(member, stats) for member in snapshot.members]
        for member, vector in zip(snapshot.members, vectors, strict=True):
            self._board.post(f"{member.label}/fold", snapshot.number, folded(vector, member.own))
            if self._job.where.rank == member.ranks[0]:
                self._board.post(f"{member.label}/vector", snapshot.number, vector.tobytes())
        if snapshot.ranges is not None:
            self._board.post("ranges", snapshot.number, json.dumps(snapshot.ranges).encode())
        if snapshot.exchanged is not None:
            self._communication.post(snapshot.number, snapshot.exchanged, stats)
        found: list[dict[str, Any]] = []
        for member, vector in zip(snapshot.members, vectors, strict=True):
            try:
                found += self._compare(snapshot, member, vector)
                self.counts["compared"] += 1
            except Missing as error:
                self._missed(member.label, str(error))
        if snapshot.exchanged is not None:
            until = time.monotonic() + PATIENCE
            differing = self._communication.check(snapshot.number, snapshot.exchanged, stats, until)
            found += [
                _complete(snapshot, event) for event in differing if self._new(event["group"], "comm", event["name"])
            ]
            self.counts["collectives"] += 1
        for event in found:
            self._report(event)
        if found:
            self._job.submit(CheckBatch(snapshot.step, snapshot.number, tuple(found)))

    def _missed(self, label: str, text: str) -> None:
        self.counts["missed"] += 1
        if label not in self._missing:
            self._job.say(f"checks: {label}: not compared: {text}", "check_missing")
        self._missing[label] = text

    def _compare(self, snapshot: Snapshot, member: Member, vector: Words) -> list[dict[str, Any]]:
        rank, until = self._job.where.rank, time.monotonic() + PATIENCE

        def read(topic: str, other: int) -> bytes:
            return self._board.read(f"{member.label}/{topic}", snapshot.number, other, until)

        found = []
        differing = compare(vector, member.own, rank, member.ranks, read)
        if differing is not None:
            event = self._event(snapshot, member, differing)
            found += [event] if event is not None else []
        if (
            member.own
            and same_own(member.own, rank, member.ranks, read)
            and self._new(member.label, "check", "generators")
        ):
            text = f"ranks {[member.ranks[0], rank]} draw the same random numbers where each should draw its own"
            found.append(_event(snapshot, member, "rng", "model-parallel-rng", [member.ranks[0], rank], text, 0))
        if snapshot.ranges is not None and member.label in ("dp-cp", "edp") and rank == member.ranks[0]:
            found += self._tiles(snapshot, member, until)
        return found

    def _event(self, snapshot: Snapshot, member: Member, differing: Disagreement) -> dict[str, Any] | None:
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
        return _event(snapshot, member, "replicas", name, differing.odd, text, len(new) - 1, kind)

    def _new(self, label: str, kind: str, name: str) -> bool:
        """True the first time: replicas that have diverged stay diverged and are reported once."""
        key = (label, kind, name)
        if key in self._known:
            return False
        self._known.add(key)
        return True

    def _tiles(self, snapshot: Snapshot, member: Member, until: float) -> list[dict[str, Any]]:
        """Check that the optimizer shards of a group cover every parameter exactly once."""
        posted = self._board.read_all("ranges", snapshot.number, member.ranks, until)
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
        return [_event(snapshot, member, "optimizer", found[0][0], list(member.ranks), text, len(found) - 1)]


def _words(member: Member, stats: CheckStats) -> Words:
    known = np.array([word & (1 << 64) - 1 for word in member.words.values()], np.uint64)
    return np.concatenate((stats.words([slot for _, _, slot in member.entries]), known))


def _event(
    snapshot: Snapshot,
    member: Member,
    check: str,
    name: str,
    ranks: list[int],
    text: str,
    others: int,
    kind: str = "check",
) -> dict[str, Any]:
    found = {"check": check, "group": member.label, "ranks": ranks, "members": list(member.ranks), "name": name}
    return _complete(snapshot, {**found, "kind": kind, "others": others, "text": text})


def _complete(snapshot: Snapshot, event: dict[str, Any]) -> dict[str, Any]:
    io = "weight" if event["kind"] in ("parameter", "grad_reduced") else ""
    return {
        **event,
        "step": snapshot.step,
        "io": io,
        "path": "",
        "microbatch": None,
        "phase": "optimizer",
        "value": float(event["others"] + 1),
        "text": f"replica: {event['text']} (step {snapshot.step})",
    }
