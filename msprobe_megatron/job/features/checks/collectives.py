"""Checks of communication: results equal on all members, sums correct, messages received as sent.

`CollectiveTaker` listens to the comm bus on checked steps, in the training thread, and takes digests of what was sent
and received and sums of what went into reductions. Calls are numbered per group (and per peer, for sends) in program
order, which is the same on all members; so a number and a digest are enough to compare. `Communication` compares them
with the other ranks, in the thread of the checks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from msprobe_megatron.job.features.checks.digests import Words, compare, folded
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.comm.bus import COMM_BUS, Exchange
from msprobe_megatron.job.store import Bulletin, Missing
from msprobe_megatron.topology.groups import GroupFacts, group_facts

MOST_MEMBERS = 64
"""Largest group for which the sums of all inputs are gathered."""
_EPS = {"float64": 2.3e-16, "float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.9e-3}
Found = dict[str, Any]
Missed = Callable[[str, str], None]
# Calls whose result must be equal on all members.
_SAME_EVERYWHERE = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor")
_SPREAD = "reduce_scatter_tensor"
_SUMS = ("SUM", "AVG")
Measure = Callable[[torch.Tensor], int]
"""`measure(tensor)`: the slot with its statistics and digest, -1 if it cannot be measured."""


class Call(NamedTuple):
    """One tensor of one call: its name, slots of input (of reductions, else -1) and output, and their sizes.

    ``spread``: the result is scattered over the members, so that only all parts together are the sum.
    """

    name: str
    before: int
    after: int
    numel: int
    dtype: str
    mean: bool
    spread: bool = False


class Exchanged(NamedTuple):
    """Everything taken in one step: calls by group, digests of sends by receiver and of receives by sender."""

    groups: dict[GroupFacts, list[Call]]
    sent: dict[int, list[int]]
    received: dict[int, list[int]]


class CollectiveTaker:
    """Takes digests while it is installed."""

    def __init__(
        self,
        measure: Measure,
        selected: Callable[[tuple[int, ...]], bool],
        fault: Callable[[BaseException, str], None],
    ) -> None:
        self._measure, self._selected, self._fault = measure, selected, fault
        self._facts: dict[int, tuple[Any, GroupFacts | None]] = {}
        self._numbers: dict[tuple[GroupFacts, str], int] = {}
        self._taken = Exchanged({}, {}, {})

    def install(self) -> None:
        """Subscribe to the comm bus."""
        self._numbers.clear()
        self._taken = Exchanged({}, {}, {})
        COMM_BUS.join(self)

    def remove(self) -> None:
        """Unsubscribe. Idempotent."""
        COMM_BUS.leave(self)
        self._facts.clear()

    def take(self) -> Exchanged:
        """Unsubscribe and return what was taken."""
        self.remove()
        return self._taken

    def begins(self, exchange: Exchange) -> tuple[GroupFacts, str, list[int]] | None:
        """Measure the inputs, before a result may overwrite them."""
        try:
            with untraced():
                return self._begins(exchange)
        except Exception as error:
            self._fault(error, f"check of {exchange.op}")
            return None

    def completed(self, exchange: Exchange, token: Any) -> None:
        """Measure the results."""
        if token is None:
            return
        try:
            with untraced():
                self._completed(exchange, *token)
        except Exception as error:
            self._fault(error, f"check of {exchange.op}")

    def failed(self, error: BaseException) -> None:
        """A call with unknown arguments cannot be compared, and neither can the calls after it."""
        self._fault(error, "arguments of a collective")

    def _begins(self, exchange: Exchange) -> tuple[GroupFacts, str, list[int]] | None:
        facts = self._group(exchange.group)
        if facts is None:
            return None
        if exchange.op == "send" and exchange.peer is not None:
            peer = facts.global_rank(exchange.peer)
            self._taken.sent.setdefault(peer, []).extend(self._measure(tensor) for tensor in exchange.sources)
            return None
        if exchange.op == "recv":
            return (facts, "recv", []) if exchange.peer is not None else None
        if exchange.op not in (*_SAME_EVERYWHERE, _SPREAD):
            return None
        number = self._numbers[facts, exchange.op] = self._numbers.get((facts, exchange.op), -1) + 1
        summed = exchange.op in ("all_reduce", _SPREAD) and exchange.reduction in _SUMS
        before = [self._measure(tensor) for tensor in exchange.sources] if summed else []
        return facts, f"{exchange.op}.{number}", before

    def _completed(self, exchange: Exchange, facts: GroupFacts, name: str, before: list[int]) -> None:
        if name == "recv":
            peer = facts.global_rank(int(exchange.peer or 0))
            self._taken.received.setdefault(peer, []).extend(self._measure(tensor) for tensor in exchange.targets)
            return
        calls = self._taken.groups.setdefault(facts, [])
        for index, tensor in enumerate(exchange.targets):
            slot = before[index] if index < len(before) else -1
            dtype = str(tensor.dtype).removeprefix("torch.")
            path = f"[{index}]" if len(exchange.targets) > 1 else ""
            mean, spread = exchange.reduction == "AVG", exchange.op == _SPREAD
            numel = exchange.sources[index].numel() if index < len(exchange.sources) else tensor.numel()
            calls.append(Call(f"{name}{path}", slot, self._measure(tensor), numel, dtype, mean, spread))

    def _group(self, group: Any) -> GroupFacts | None:
        """The members of a group; None if it has a single one, or one that is not checked."""
        found = self._facts.get(id(group))
        if found is None:
            facts = group_facts(group)
            wanted = facts if len(facts.ranks) > 1 and self._selected(facts.ranks) else None
            found = self._facts[id(group)] = (group, wanted)
        return found[1]


class CheckStats(NamedTuple):
    """Statistics and digests of a check, by slot."""

    floats: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    digests: Words

    def words(self, slots: list[int]) -> Words:
        """Digests of these slots, zero for -1."""
        return np.append(self.digests, np.uint64(0))[np.array(slots, np.int64)]


class Communication:
    """Compares what one rank communicated with what the other members posted."""

    def __init__(self, board: Bulletin, rank: int, missed: Missed) -> None:
        self._board, self._rank, self._missed = board, rank, missed

    def post(self, number: int, exchanged: Exchanged, stats: CheckStats) -> None:
        """Post what the other ranks need."""
        for facts, calls in exchanged.groups.items():
            topic, words = _topic(facts), _results(calls, stats)
            self._board.post(f"{topic}/fold", number, folded(words))
            if self._rank == facts.ranks[0]:
                self._board.post(f"{topic}/vector", number, words.tobytes())
            if len(facts.ranks) <= MOST_MEMBERS:
                self._board.post(f"{topic}/sums", number, json.dumps([_sums(call, stats) for call in calls]).encode())
        for peer, slots in exchanged.sent.items():
            self._board.post(f"to/{peer}", number, stats.words(slots).tobytes())

    def check(self, number: int, exchanged: Exchanged, stats: CheckStats, until: float) -> list[Found]:
        """The findings that this rank has to report; a member that does not answer is noted, not raised."""
        found: list[Found] = []
        for facts, calls in exchanged.groups.items():
            try:
                found += self._results(number, facts, calls, stats, until)
                if self._rank == facts.ranks[0] and len(facts.ranks) <= MOST_MEMBERS:
                    found += self._added(number, facts, calls, until)
            except Missing as error:
                self._missed(f"communication over {facts.label}", str(error))
        for peer, slots in exchanged.received.items():
            try:
                found += self._received(number, peer, stats.words(slots), until)
            except Missing as error:
                self._missed(f"messages from rank {peer}", str(error))
        return found

    def _results(
        self, number: int, facts: GroupFacts, calls: list[Call], stats: CheckStats, until: float
    ) -> list[Found]:
        def read(topic: str, rank: int) -> bytes:
            return self._board.read(f"{_topic(facts)}/{topic}", number, rank, until)

        words = _results(calls, stats)
        differing = compare(words, 0, self._rank, facts.ranks, read)
        if differing is None:
            return []
        names = [calls[place].name for place in differing.places] or ["the number of calls"]
        text = f"the result of {names[0]} over {facts.label} is not the same on ranks {differing.odd}"
        return [_found(facts, "collectives", names, differing.odd, text)]

    def _added(self, number: int, facts: GroupFacts, calls: list[Call], until: float) -> list[Found]:
        posted = self._board.read_all(f"{_topic(facts)}/sums", number, facts.ranks, until)
        members = [json.loads(content) for content in posted.values()]
        wrong = [
            call.name
            for place, call in enumerate(calls)
            if all(place < len(member) for member in members)
            and not _is_sum(call, [member[place] for member in members])
        ]
        if not wrong:
            return []
        text = f"the result of {wrong[0]} over {facts.label} is not the sum of the inputs of the ranks"
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


def _results(calls: list[Call], stats: CheckStats) -> Words:
    """Digests of results that must be equal on all members; zero where each holds a part of its own."""
    return stats.words([-1 if call.spread else call.after for call in calls])


def _sums(call: Call, stats: CheckStats) -> list[float] | None:
    """Sum and norm of this rank's input of a reduction, sum of its output; None where they are not comparable."""
    if min(call.before, call.after) < 0 or (stats.counts[[call.before, call.after], :3] != 0).any():
        return None
    given, got = stats.floats[call.before], stats.floats[call.after]
    return [float(given[2]), math.sqrt(float(given[3])), float(got[2])]


def _is_sum(call: Call, members: list[list[float] | None]) -> bool:
    """True if the output can be the sum of the inputs: each addition rounds, all of them possibly in one direction."""
    known = [sums for sums in members if sums is not None]
    if len(known) != len(members):
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
