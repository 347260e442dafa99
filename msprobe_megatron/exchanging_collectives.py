"""Comparing communication, in the thread of the checks: results alike on all members, sums right, sends as received."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_megatron.bulletin import Bulletin, Missing
from msprobe_megatron.collective_checks import Call, Exchanged
from msprobe_megatron.probes.agreement import Words, compare, folded
from msprobe_megatron.topology.groups import GroupFacts

MOST_MEMBERS = 64
"""Members of a group up to which the sums of all inputs are brought together."""
_EPS = {"float64": 2.3e-16, "float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.9e-3}
Found = dict[str, Any]
Missed = Callable[[str, str], None]


class Figures(NamedTuple):
    """Figures and digests of a check, by slot."""

    floats: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    digests: Words

    def words(self, slots: list[int]) -> Words:
        """Digests of these slots, zero for -1."""
        return np.append(self.digests, np.uint64(0))[np.array(slots, np.int64)]


class Communication:
    """Compares what one rank exchanged with what the others say they did.

    Example::

        Communication(board, rank=1, missed=note).check(number, exchanged, figures, until)
    """

    def __init__(self, board: Bulletin, rank: int, missed: Missed) -> None:
        self._board, self._rank, self._missed = board, rank, missed

    def post(self, number: int, exchanged: Exchanged, figures: Figures) -> None:
        """Leave for the others what they need."""
        for facts, calls in exchanged.groups.items():
            topic, words = _topic(facts), _results(calls, figures)
            self._board.post(f"{topic}/fold", number, folded(words))
            if self._rank == facts.ranks[0]:
                self._board.post(f"{topic}/vector", number, words.tobytes())
            if len(facts.ranks) <= MOST_MEMBERS:
                self._board.post(f"{topic}/sums", number, json.dumps([_sums(call, figures) for call in calls]).encode())
        for peer, slots in exchanged.sent.items():
            self._board.post(f"to/{peer}", number, figures.words(slots).tobytes())

    def check(self, number: int, exchanged: Exchanged, figures: Figures, until: float) -> list[Found]:
        """What is wrong, as far as this rank has to tell; raises nothing when somebody does not answer."""
        found: list[Found] = []
        for facts, calls in exchanged.groups.items():
            try:
                found += self._results(number, facts, calls, figures, until)
                if self._rank == facts.ranks[0] and len(facts.ranks) <= MOST_MEMBERS:
                    found += self._added(number, facts, calls, until)
            except Missing as error:
                self._missed(f"communication over {facts.label}", str(error))
        for peer, slots in exchanged.received.items():
            try:
                found += self._received(number, peer, figures.words(slots), until)
            except Missing as error:
                self._missed(f"messages from rank {peer}", str(error))
        return found

    def _results(
        self, number: int, facts: GroupFacts, calls: list[Call], figures: Figures, until: float
    ) -> list[Found]:
        def read(topic: str, rank: int) -> bytes:
            return self._board.read(f"{_topic(facts)}/{topic}", number, rank, until)

        words = _results(calls, figures)
        differing = compare(words, 0, self._rank, facts.ranks, read)
        if differing is None:
            return []
        names = [calls[place].name for place in differing.places] or ["the number of calls"]
        text = f"the result of {names[0]} over {facts.label} is not the same on ranks {differing.odd}"
        return [_found(facts, "collectives", names, differing.odd, text)]

    def _added(self, number: int, facts: GroupFacts, calls: list[Call], until: float) -> list[Found]:
        told = self._board.read_all(f"{_topic(facts)}/sums", number, facts.ranks, until)
        members = [json.loads(content) for content in told.values()]
        wrong = [
            call.name
            for place, call in enumerate(calls)
            if all(place < len(member) for member in members)
            and not _is_sum(call, [member[place] for member in members])
        ]
        if not wrong:
            return []
        text = f"the result of {wrong[0]} over {facts.label} is not the sum of what the ranks gave"
        return [_found(facts, "collectives", wrong, list(facts.ranks), text)]

    def _received(self, number: int, peer: int, got: Words, until: float) -> list[Found]:
        sent = np.frombuffer(self._board.read(f"to/{self._rank}", number, peer, until), np.uint64)
        facts = GroupFacts("messages", (peer, self._rank))
        if len(sent) != len(got):
            text = f"rank {peer} sent {len(sent)} tensors to rank {self._rank}, which received {len(got)}"
            return [_found(facts, "collectives", ["messages"], [peer, self._rank], text)]
        wrong = [f"message.{place}" for place in np.flatnonzero(sent != got)]
        if not wrong:
            return []
        text = f"{wrong[0]} from rank {peer} to rank {self._rank} is not what was sent"
        return [_found(facts, "collectives", wrong, [peer, self._rank], text)]


def _results(calls: list[Call], figures: Figures) -> Words:
    """Digests of what all members must hold alike; zero where each holds a part of its own."""
    return figures.words([-1 if call.spread else call.after for call in calls])


def _sums(call: Call, figures: Figures) -> list[float] | None:
    """Sum and norm of what this rank gave to a reduction, sum of what it got; None where that says nothing."""
    if min(call.before, call.after) < 0 or (figures.counts[[call.before, call.after], :3] != 0).any():
        return None
    given, got = figures.floats[call.before], figures.floats[call.after]
    return [float(given[2]), math.sqrt(float(given[3])), float(got[2])]


def _is_sum(call: Call, told: list[list[float] | None]) -> bool:
    """Whether an output can be the sum of the inputs: each addition rounds, and all roundings may point one way."""
    known = [sums for sums in told if sums is not None]
    if len(known) != len(told):
        return True
    expected = sum(given for given, _, _ in known) / (len(known) if call.mean else 1)
    result = sum(got for _, _, got in known) if call.spread else known[0][2]
    scale = math.sqrt(call.numel) * sum(norm for _, norm, _ in known)
    return abs(expected - result) <= (2 * len(known) * _EPS.get(call.dtype, 1e-12) + 1e-12) * scale + 1e-300


def _found(facts: GroupFacts, check: str, names: list[str], ranks: list[int], text: str) -> Found:
    name = f"comm/{facts.label}/{names[0]}"
    others = f"; {len(names) - 1} more" if len(names) > 1 else ""
    found = {"check": check, "group": facts.label, "ranks": ranks, "members": list(facts.ranks), "name": name}
    return {**found, "kind": "comm", "others": len(names) - 1, "text": f"{text}{others}"}


def _topic(facts: GroupFacts) -> str:
    return f"c/{facts.label}/{facts.ranks[0]}-{facts.ranks[-1]}x{len(facts.ranks)}"
