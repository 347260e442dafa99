"""Site: what collectives, sends and receives gave and got (kind ``comm``).

Stands on the `Wire` and feeds a probe. An input is told before the call; a result when it has been waited for, which
for an asynchronous call may be much later. Rows say operation, group, members, peer and bytes in ``extra``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from msprobe_megatron.clock import Clock
from msprobe_megatron.sites.arguments import own_work
from msprobe_megatron.sites.exchanges import WIRE, Exchange
from msprobe_megatron.sites.frames import ModuleFrames
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.groups import GroupFacts, group_facts
from msprobe_megatron.topology.places import Place
from msprobe_megatron.topology.shards import ShardSpec

_LAYOUT = ShardSpec.unmergeable("communication")
Fault = Callable[[BaseException, str], None]
NewSite = Callable[[str, str, int], int]


class Sink(Protocol):
    """Who is told of a tensor, and what it wants to know."""

    def wants(self, name: str) -> bool:
        """Whether an exchange of this name is to be watched."""

    def wants_io(self, direction: str, io: str) -> bool:
        """Whether inputs or outputs (`io`) of forward or backward (`direction`) are to be watched."""

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Take note of a tensor, now: it may be gone or changed after the call."""


class MemoryWatch:
    """Tells that memory changes: collectives write in place, and no version counter tells of it.

    Joins before the sites: what they see of a result is then measured anew, and what they see of an input is not.

    Example::

        watch = MemoryWatch(probe.memory_changed)
        watch.install(); ...; watch.remove()
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def install(self) -> None:
        """Begin to listen."""
        WIRE.join(self)

    def remove(self) -> None:
        """Listen no more. Safe to call twice."""
        WIRE.leave(self)

    def begins(self, exchange: Exchange) -> None:
        """From here on the result may be written."""
        self._changed()

    def completed(self, exchange: Exchange, token: Any) -> None:
        """Up to here it may have been."""
        self._changed()

    def failed(self, error: BaseException) -> None:
        """Something was called that cannot be read: it may have written anywhere."""
        self._changed()


class _Told(NamedTuple):
    """What the result of an exchange will be told with."""

    name: str
    microbatch: int | None
    phase: str
    chunk: int
    facts: GroupFacts


class CommSite:
    """Watches communication between `install` and `remove`.

    With `frames`, an exchange inside a module's forward is named after the module; all others after their group, and
    numbered within the step. `phase` and `microbatch` are the clock's; `optimizing` says that the optimizer runs.

    Example::

        site = CommSite(probe, clock, where, fault)
        site.install(); ...; site.remove()
    """

    def __init__(
        self,
        sink: Sink,
        clock: Clock,
        where: Coordinates,
        fault: Fault,
        frames: ModuleFrames | None = None,
        new_site: NewSite | None = None,
    ) -> None:
        self._sink, self._clock, self._where, self._fault = sink, clock, where, fault
        self._frames, self._new_site = frames, new_site
        self._input, self._output = (sink.wants_io("forward", io) for io in ("input", "output"))
        self._groups: dict[int, GroupFacts] = {}
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._sites: dict[tuple[str, int], int | None] = {}
        self._places: dict[tuple[Any, ...], Place] = {}
        self._waiting = 0
        self.optimizing = False
        self.fired = 0
        self.never_waited = 0
        """Exchanges whose result nobody had waited for when their step was over: they have no output row."""

    def install(self) -> None:
        """Begin to see exchanges."""
        self.optimizing = False
        self._numbers.clear()
        self._waiting = 0
        WIRE.join(self)

    def remove(self) -> None:
        """See no more; results that still arrive are ignored. Safe to call twice."""
        WIRE.leave(self)
        self.never_waited += self._waiting
        self._waiting = 0
        self._groups.clear()

    def begins(self, exchange: Exchange) -> _Told | None:
        """Tell what goes in."""
        try:
            with own_work():
                return self._begins(exchange)
        except Exception as error:
            self._fault(error, f"input of {exchange.op}")
            return None

    def completed(self, exchange: Exchange, token: Any) -> None:
        """Tell what came out."""
        try:
            with own_work():
                self._completed(exchange, token)
        except Exception as error:
            self._fault(error, f"output of {exchange.op}")

    def failed(self, error: BaseException) -> None:
        """A call whose arguments are unknown is a fault of the kit."""
        self._fault(error, "arguments of a collective")

    def _begins(self, exchange: Exchange) -> _Told | None:
        facts = self._groups.get(id(exchange.group))
        if facts is None:
            facts = self._groups[id(exchange.group)] = group_facts(exchange.group)
        told = self._told(exchange, facts)
        if told is not None:
            self.fired += 1
            if self._input:
                self._tell(exchange, told, "input", exchange.sources)
            self._waiting += bool(exchange.targets)
        return told

    def _completed(self, exchange: Exchange, told: _Told | None) -> None:
        if told is not None and exchange.targets:
            self._waiting -= 1
            if self._output:
                self._tell(exchange, told, "output", exchange.targets)

    def _told(self, exchange: Exchange, facts: GroupFacts) -> _Told | None:
        phase, moment = ("optimizer", None) if self.optimizing else self._clock.passing()
        api = f"torch.distributed.{exchange.op}"
        running = self._frames.stack[-1] if self._frames is not None and self._frames.stack else None
        if running is not None and phase != "backward":
            number = running.counts.get(api, 0)
            running.counts[api] = number + 1
            name, chunk = f"{running.name}/{api}.{number}", running.chunk
        else:
            number = self._numbers[facts.label, exchange.op]
            self._numbers[facts.label, exchange.op] = number + 1
            name, chunk = f"comm/{facts.label}/{api}.{number}", moment.chunk if moment is not None else 0
        if (name, chunk) not in self._sites:
            self._sites[name, chunk] = self._site(name, api, chunk)
        if self._sites[name, chunk] is None:
            return None
        return _Told(name, None if moment is None else moment.microbatch, phase, chunk, facts)

    def _site(self, name: str, api: str, chunk: int) -> int | None:
        if not self._sink.wants(name):
            return None
        return -1 if self._new_site is None else self._new_site(name, api, chunk)

    def _tell(self, exchange: Exchange, told: _Told, io: str, tensors: list[torch.Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            path = "" if len(tensors) == 1 else str(index)
            place = self._place(exchange, told, io, path)
            self._sink.see(place, tensor, told.microbatch, told.phase)

    def _place(self, exchange: Exchange, told: _Told, io: str, path: str) -> Place:
        nbytes = exchange.nbytes
        how = (exchange.peer, exchange.root, exchange.reduction, exchange.asynchronous)
        key = (told.name, told.chunk, told.facts, how, nbytes, io, path)
        found = self._places.get(key)
        if found is None:
            site = self._sites[told.name, told.chunk]
            op = f"torch.distributed.{exchange.op}"
            extra = json.dumps(_facts(exchange, told.facts, nbytes))
            found = self._places[key] = Place(
                "comm", told.name, io, path, op, told.chunk, -1 if site is None else site, _layout, _one, extra=extra
            )
        return found


def _facts(exchange: Exchange, facts: GroupFacts, nbytes: int) -> dict[str, Any]:
    found: dict[str, Any] = {"op": exchange.op, "group": facts.label, "ranks": list(facts.ranks), "bytes": nbytes}
    if exchange.peer is not None:
        found["peer"] = facts.global_rank(exchange.peer)
    if exchange.root is not None:
        found["root"] = facts.global_rank(exchange.root)
    if exchange.reduction is not None:
        found["reduction"] = exchange.reduction
    if exchange.asynchronous is not None:
        found["async"] = exchange.asynchronous
    return found


def _layout(shape: tuple[int, ...]) -> ShardSpec:
    return _LAYOUT


def _one(axis: str) -> int:
    return 1
