"""Communication of this process, as it happens: who listens, and what is under way.

Collectives and sends are met at the methods of the process group, below every name under which a program may have
imported `torch.distributed`'s functions, and a result is complete when its `Work` has been waited for. So no function
of torch.distributed is replaced. The patches (patches/distributed.py) exist only while somebody listens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from msprobe_megatron.patching import PatchSet, declared


@dataclass(frozen=True, eq=False)
class Exchange:
    """One collective, send or receive: what goes in, where the result will be, with whom.

    ``peer`` is the number in the group of the other side of a send or receive, ``root`` that of the one member that
    gives or gets. ``asynchronous`` is None where that cannot be known. ``options`` are those of a reducing call.
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
        """SUM, AVG, …: asked of the options only when it is wanted, which takes longer than all the rest."""
        operation = getattr(self.options, "reduceOp", None)
        return None if operation is None else str(getattr(operation, "op", operation)).rpartition(".")[2]

    @property
    def nbytes(self) -> int:
        """Bytes of what goes in, or where nothing does, of what comes out."""
        return sum(x.numel() * x.element_size() for x in self.sources or self.targets)


class Listener(Protocol):
    """Who is told of communication. Faults of a listener are its own: it must not raise."""

    def begins(self, exchange: Exchange) -> Any:
        """An exchange is about to be called; what this returns is handed to `completed`."""

    def completed(self, exchange: Exchange, token: Any) -> None:
        """The exchange has been waited for: what came is in ``exchange.targets``."""

    def failed(self, error: BaseException) -> None:
        """The arguments of a call could not be read."""


Read = Callable[[Any, tuple[Any, ...]], Exchange]


class Wire:
    """All communication of the process; the one instance is `WIRE`.

    Example::

        WIRE.join(listener)
        ...
        WIRE.leave(listener)
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._patches: PatchSet | None = None
        self._under_way: dict[int, tuple[Any, list[Exchange]]] = {}
        self._together: dict[int, list[Exchange]] = {}

    def join(self, listener: Listener) -> None:
        """Tell this listener too; the first one brings the patches. Joining twice is joining once."""
        if listener in self._listeners:
            return
        self._listeners = (*self._listeners, listener)
        if self._patches is None:
            self._patches = PatchSet(declared("communication"), self)
        self._patches.apply()

    def leave(self, listener: Listener) -> None:
        """Tell this listener no more, not even of what it saw begin; the last one takes the patches with it."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)
        if not self._listeners and self._patches is not None:
            self._patches.revert()
            self._under_way.clear()
            self._together.clear()

    def ledger(self) -> list[dict[str, Any]]:
        """What became of the patches."""
        return self._patches.ledger() if self._patches is not None else []

    # What the patches tell.

    def begin(self, read: Read, group: Any, args: tuple[Any, ...]) -> Exchange | None:
        """A method of a process group is about to be called; None when its arguments cannot be read."""
        try:
            exchange = read(group, args)
        except Exception as error:
            for listener in self._listeners:
                listener.failed(error)
            return None
        # Like nested contexts: who joined first is the last to be told of a beginning, and the first of an end.
        exchange.tokens.extend([(listener, listener.begins(exchange)) for listener in reversed(self._listeners)])
        exchange.tokens.reverse()
        return exchange

    def called(self, exchange: Exchange, work: Any) -> None:
        """The method has returned ``work``; None means that everything has happened already."""
        together = self._together.get(id(exchange.group))
        if together is not None:
            together.append(exchange)
        else:
            self._await(work, [exchange])

    def coalescing(self, group: Any) -> None:
        """From here on the exchanges of this group have one `Work` together."""
        self._together[id(group)] = []

    def coalesced(self, group: Any, work: Any) -> None:
        """That is their `Work`."""
        self._await(work, self._together.pop(id(group), []))

    def waited(self, work: Any) -> None:
        """Somebody has waited for this `Work`."""
        held = self._under_way.pop(id(work), None)
        if held is not None:
            self._complete(held[1])

    def _await(self, work: Any, exchanges: list[Exchange]) -> None:
        if work is None:
            self._complete(exchanges)
        elif exchanges:
            key = id(work)
            # A weak reference: to keep a `Work` would keep its tensors and streams.
            gone = weakref.ref(work, lambda _: self._under_way.pop(key, None))
            before = self._under_way.get(key)
            self._under_way[key] = (gone, [*(before[1] if before else []), *exchanges])

    def _complete(self, exchanges: Sequence[Exchange]) -> None:
        for exchange in exchanges:
            for listener, token in exchange.tokens:
                if listener in self._listeners:
                    listener.completed(exchange, token)


WIRE = Wire()
