"""Communication of this process: subscriptions, and the exchanges in flight.

Collectives and sends are observed at the methods of the process group, below every name under which a program may have
imported `torch.distributed`'s functions, so no function of torch.distributed is replaced. A result is complete when its
`Work` has been waited for. The patches (patches/distributed.py) exist only while there is a listener.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import distributed

from msprobe_megatron.job.patching.patch_set import PatchSet, declared


@dataclass(frozen=True, eq=False)
class Exchange:
    """One collective, send or receive: inputs, where the result will be, and the group.

    ``peer`` is the group rank of the other side of a send or receive, ``root`` that of the source or destination of a
    rooted collective. ``asynchronous`` is None if unknown. ``options`` are those of a reducing call.
    """

    op: str
    group: Any
    sources: list[torch.Tensor]
    targets: list[torch.Tensor]
    peer: int | None = None
    root: int | None = None
    options: Any = None
    asynchronous: bool | None = None
    tokens: list[tuple[Listener, Any]] = field(default_factory=list, repr=False)

    @cached_property
    def reduction(self) -> str | None:
        """SUM, AVG, …; read from the options on demand, because that takes longer than everything else."""
        operation = getattr(self.options, "reduceOp", None)
        return None if operation is None else str(getattr(operation, "op", operation)).rpartition(".")[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs, or of the outputs if there are no inputs."""
        return sum(x.numel() * x.element_size() for x in self.sources or self.targets)


class Listener(Protocol):
    """A subscriber of the bus; its methods must not raise."""

    def begins(self, exchange: Exchange) -> Any:
        """An exchange is about to start; the return value is passed to `completed`."""

    def completed(self, exchange: Exchange, token: Any) -> None:
        """The exchange has been waited for: the result is in ``exchange.targets``."""

    def failed(self, error: BaseException) -> None:
        """The arguments of a call could not be read."""


Read = Callable[[Any, tuple[Any, ...]], Exchange]


def derived(kind: type) -> Iterator[type]:
    """Classes of Python that are derived from a class of torch and are not torch's own."""
    each: type
    for each in kind.__subclasses__():
        if each.__module__.partition(".")[0] != "torch":
            yield each
        yield from derived(each)


def derived_classes() -> list[type]:
    """Groups and handles that other code has defined: they may override what the patches replace."""
    c10d = distributed.distributed_c10d
    return [*derived(c10d.ProcessGroup), *derived(c10d.Work)] if distributed.is_available() else []


class CommBus:
    """All communication of the process; the one instance is `COMM_BUS`."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._patches: PatchSet | None = None
        self._classes: list[type] = []
        self._in_flight: dict[int, tuple[Any, list[Exchange]]] = {}
        self._coalesced: dict[int, list[Exchange]] = {}

    def join(self, listener: Listener) -> None:
        """Subscribe. The first listener applies the patches; idempotent."""
        if listener in self._listeners:
            return
        self._listeners = (*self._listeners, listener)
        classes = derived_classes()
        if self._patches is None:
            self._patches = PatchSet(declared("communication"), self)
        elif classes != self._classes:
            self._patches.extend(declared("communication"))
        self._classes = classes
        self._patches.apply()

    def leave(self, listener: Listener) -> None:
        """Unsubscribe. Pending completions are dropped; the last listener removes the patches."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)
        if not self._listeners and self._patches is not None:
            self._patches.revert()
            self._in_flight.clear()
            self._coalesced.clear()

    def ledger(self) -> list[dict[str, Any]]:
        """State of the patches."""
        return self._patches.ledger() if self._patches is not None else []

    # Called by the patches.

    def begin(self, read: Read, group: Any, args: tuple[Any, ...]) -> Exchange | None:
        """A method of a process group is about to be called; None when its arguments cannot be read."""
        try:
            exchange = read(group, args)
        except Exception as error:
            for listener in self._listeners:
                listener.failed(error)
            return None
        # Like nested contexts: the first subscriber sees a beginning last and a completion first.
        exchange.tokens.extend([(listener, listener.begins(exchange)) for listener in reversed(self._listeners)])
        exchange.tokens.reverse()
        return exchange

    def called(self, exchange: Exchange, work: Any) -> None:
        """The method has returned ``work``; None means that the exchange is complete."""
        coalesced = self._coalesced.get(id(exchange.group))
        if coalesced is not None:
            coalesced.append(exchange)
        else:
            self._await(work, [exchange])

    def coalescing(self, group: Any) -> None:
        """From here on the exchanges of this group share one `Work`."""
        self._coalesced[id(group)] = []

    def coalesced(self, group: Any, work: Any) -> None:
        """Their common `Work` is ``work``."""
        self._await(work, self._coalesced.pop(id(group), []))

    def waited(self, work: Any) -> None:
        """The program has waited for this `Work`."""
        held = self._in_flight.pop(id(work), None)
        if held is not None:
            self._complete(held[1])

    def _await(self, work: Any, exchanges: list[Exchange]) -> None:
        if work is None:
            self._complete(exchanges)
        elif exchanges:
            key = id(work)
            # A weak reference: a `Work` would keep its tensors and streams alive.
            gone = weakref.ref(work, lambda _: self._in_flight.pop(key, None))
            before = self._in_flight.get(key)
            self._in_flight[key] = (gone, [*(before[1] if before else []), *exchanges])

    def _complete(self, exchanges: Sequence[Exchange]) -> None:
        for exchange in exchanges:
            for listener, token in exchange.tokens:
                if listener in self._listeners:
                    listener.completed(exchange, token)


COMM_BUS = CommBus()
