"""Site: inputs and results of collectives, sends and receives (kind ``comm``).

Subscribes to the `CommBus` and reports to a probe. An input is reported before the call; a result when it has been
waited for, which for an asynchronous call may be much later. Rows have operation, group, ranks, peer and bytes in
``extra``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.calls.naming import ModuleFrames
from msprobe_megatron.job.sites.comm.bus import COMM_BUS, Exchange
from msprobe_megatron.job.sites.sink import Sink
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.groups import GroupFacts, group_facts
from msprobe_megatron.topology.shards import Place, ShardSpec

_LAYOUT = ShardSpec.unmergeable("communication")
Fault = Callable[[BaseException, str], None]
NewSite = Callable[[str, str, int], int]


class MemoryWatch:
    """Invalidates cached statistics: collectives write in place without a change of version counters.

    Subscribes before the sites, so that a result they report is measured anew and an input is not.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def install(self) -> None:
        """Subscribe."""
        COMM_BUS.join(self)

    def remove(self) -> None:
        """Unsubscribe. Safe to call twice."""
        COMM_BUS.leave(self)

    def begins(self, exchange: Exchange) -> None:
        """From here on the result may be written to."""
        self._changed()

    def completed(self, exchange: Exchange, token: Any) -> None:
        """Until here it may have been written to."""
        self._changed()

    def failed(self, error: BaseException) -> None:
        """The arguments of a call are unknown: it may write anywhere."""
        self._changed()


class _CommCall(NamedTuple):
    """How an exchange is reported: its name, and where and when it was called."""

    name: str
    microbatch: int | None
    phase: str
    chunk: int
    facts: GroupFacts


class CommSite:
    """Reports communication between `install` and `remove`.

    With `frames`, an exchange inside a module's forward is named after the module; all others after their group, and
    numbered within the step. `phase` and `microbatch` are the clock's; `optimizing` is set while the optimizer runs.
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
        """Exchanges that had not been waited for when their step ended: they have no output row."""

    def install(self) -> None:
        """Start to report exchanges."""
        self.optimizing = False
        self._numbers.clear()
        self._waiting = 0
        COMM_BUS.join(self)

    def remove(self) -> None:
        """Report no more; results that still arrive are ignored. Safe to call twice."""
        COMM_BUS.leave(self)
        self.never_waited += self._waiting
        self._waiting = 0
        self._groups.clear()

    def begins(self, exchange: Exchange) -> _CommCall | None:
        """Report the inputs."""
        try:
            with untraced():
                return self._begins(exchange)
        except Exception as error:
            self._fault(error, f"input of {exchange.op}")
            return None

    def completed(self, exchange: Exchange, token: Any) -> None:
        """Report the results."""
        try:
            with untraced():
                self._completed(exchange, token)
        except Exception as error:
            self._fault(error, f"output of {exchange.op}")

    def failed(self, error: BaseException) -> None:
        """A call whose arguments cannot be read is a fault of the kit."""
        self._fault(error, "arguments of a collective")

    def _begins(self, exchange: Exchange) -> _CommCall | None:
        facts = self._groups.get(id(exchange.group))
        if facts is None:
            facts = self._groups[id(exchange.group)] = group_facts(exchange.group)
        call = self._identify(exchange, facts)
        if call is not None:
            self.fired += 1
            if self._input:
                self._report(exchange, call, "input", exchange.sources)
            self._waiting += bool(exchange.targets)
        return call

    def _completed(self, exchange: Exchange, call: _CommCall | None) -> None:
        if call is not None and exchange.targets:
            self._waiting -= 1
            if self._output:
                self._report(exchange, call, "output", exchange.targets)

    def _identify(self, exchange: Exchange, facts: GroupFacts) -> _CommCall | None:
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
        return _CommCall(name, None if moment is None else moment.microbatch, phase, chunk, facts)

    def _site(self, name: str, api: str, chunk: int) -> int | None:
        if not self._sink.wants(name):
            return None
        return -1 if self._new_site is None else self._new_site(name, api, chunk)

    def _report(self, exchange: Exchange, call: _CommCall, io: str, tensors: list[torch.Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            path = "" if len(tensors) == 1 else str(index)
            place = self._place(exchange, call, io, path)
            self._sink.see(place, tensor, call.microbatch, call.phase)

    def _place(self, exchange: Exchange, call: _CommCall, io: str, path: str) -> Place:
        nbytes = exchange.nbytes
        how = (exchange.peer, exchange.root, exchange.reduction, exchange.asynchronous)
        key = (call.name, call.chunk, call.facts, how, nbytes, io, path)
        found = self._places.get(key)
        if found is None:
            site = self._sites[call.name, call.chunk]
            op = f"torch.distributed.{exchange.op}"
            extra = json.dumps(_facts(exchange, call.facts, nbytes))
            found = self._places[key] = Place(
                "comm", call.name, io, path, op, call.chunk, -1 if site is None else site, _layout, _one, extra=extra
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
