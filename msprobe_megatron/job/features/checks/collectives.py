"""What the checks take of communication: digests of what was sent and got, sums of what went into reductions.

Listens to the wire on checked steps only. Calls are numbered by group (and by peer, for sends), in the order of the
program, which is the same on all members; so a number and a digest are enough to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from msprobe_megatron.sites.arguments import own_work
from msprobe_megatron.sites.exchanges import WIRE, Exchange
from msprobe_megatron.topology.groups import GroupFacts, group_facts

# Calls after which all members must hold the same.
_SAME_EVERYWHERE = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor")
_SPREAD = "reduce_scatter_tensor"
_SUMS = ("SUM", "AVG")
Measure = Callable[[torch.Tensor], int]
"""`measure(tensor)`: the slot with its figures and digest, -1 when there is none."""


class Call(NamedTuple):
    """One tensor of one call: what, slots of input (of reductions, else -1) and output, and of what.

    ``spread``: the result is cut over the members, so that only all of it together is the sum.
    """

    name: str
    before: int
    after: int
    numel: int
    dtype: str
    mean: bool
    spread: bool = False


class Exchanged(NamedTuple):
    """All that was taken in one step: calls by group, digests of sends by receiver and of receives by sender."""

    groups: dict[GroupFacts, list[Call]]
    sent: dict[int, list[int]]
    received: dict[int, list[int]]


class CollectiveTaker:
    """Takes digests while it is installed.

    Example::

        taker = CollectiveTaker(measure, wholly_selected, fault)
        taker.install(); ...; exchanged = taker.take()
    """

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
        """Begin to listen."""
        self._numbers.clear()
        self._taken = Exchanged({}, {}, {})
        WIRE.join(self)

    def remove(self) -> None:
        """Listen no more. Safe to call twice."""
        WIRE.leave(self)
        self._facts.clear()

    def take(self) -> Exchanged:
        """What was seen, and listen no more."""
        self.remove()
        return self._taken

    def begins(self, exchange: Exchange) -> tuple[GroupFacts, str, list[int]] | None:
        """Measure what goes in, before a result may take its place."""
        try:
            with own_work():
                return self._begins(exchange)
        except Exception as error:
            self._fault(error, f"check of {exchange.op}")
            return None

    def completed(self, exchange: Exchange, token: Any) -> None:
        """Measure what came out."""
        if token is None:
            return
        try:
            with own_work():
                self._completed(exchange, *token)
        except Exception as error:
            self._fault(error, f"check of {exchange.op}")

    def failed(self, error: BaseException) -> None:
        """A call whose arguments are unknown cannot be compared, and neither can those after it."""
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
        """Who is in a group; None for one that is not wholly checked, or has one member."""
        found = self._facts.get(id(group))
        if found is None:
            facts = group_facts(group)
            wanted = facts if len(facts.ranks) > 1 and self._selected(facts.ranks) else None
            found = self._facts[id(group)] = (group, wanted)
        return found[1]
