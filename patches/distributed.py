"""torch.distributed: collectives, sends and receives, at the methods of the process group that do them.

Megatron binds functions of torch.distributed to names of its own when it is imported, and torch compares `P2POp.op`
with `isend` and `irecv` by identity; the methods of `ProcessGroup` lie below all of them. A result is complete when
`Work.wait` returns. The wrappers pass arguments and results through unchanged.

A class of Python that is derived from either (fault tolerance, tests) may override these methods: `overrides` are the
same patches for the classes that do. What such a method calls of other groups is part of its work, and not reported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, NamedTuple, cast

import torch

from msprobe_megatron.job.patching.patch_set import Patch, Wrap
from msprobe_megatron.job.sites.comm.bus import Exchange, derived_classes

_C10D = "torch.distributed.distributed_c10d"
_FIRST, _SECOND = 0, 1


class _Method(NamedTuple):
    """How to read a method of ProcessGroup: which argument is sent, which is written to, which holds the options.

    ``one``: "gives" where only the root's input counts, "gets" where only the root has a result.
    """

    name: str
    op: str
    sources: int | None
    targets: int | None
    options: int | None
    one: str = ""


# Names of several releases: one that this torch does not have is a line in the ledger.
_METHODS = (
    _Method("allreduce", "all_reduce", _FIRST, _FIRST, 1),
    _Method("allreduce_coalesced", "all_reduce", _FIRST, _FIRST, 1),
    _Method("broadcast", "broadcast", _FIRST, _FIRST, 1, "gives"),
    _Method("reduce", "reduce", _FIRST, _FIRST, 1, "gets"),
    _Method("allgather", "all_gather", _SECOND, _FIRST, 2),
    _Method("allgather_coalesced", "all_gather", _SECOND, _FIRST, 2),
    _Method("_allgather_base", "all_gather_into_tensor", _SECOND, _FIRST, 2),
    _Method("all_gather_single", "all_gather_into_tensor", _SECOND, _FIRST, 2),
    _Method("allgather_into_tensor_coalesced", "all_gather_into_tensor", _SECOND, _FIRST, 2),
    _Method("all_gather_single_coalesced", "all_gather_into_tensor", _SECOND, _FIRST, 2),
    _Method("gather", "gather", _SECOND, _FIRST, 2, "gets"),
    _Method("scatter", "scatter", _SECOND, _FIRST, 2, "gives"),
    _Method("reduce_scatter", "reduce_scatter", _SECOND, _FIRST, 2),
    _Method("_reduce_scatter_base", "reduce_scatter_tensor", _SECOND, _FIRST, 2),
    _Method("reduce_scatter_single", "reduce_scatter_tensor", _SECOND, _FIRST, 2),
    _Method("reduce_scatter_tensor_coalesced", "reduce_scatter_tensor", _SECOND, _FIRST, 2),
    _Method("reduce_scatter_single_coalesced", "reduce_scatter_tensor", _SECOND, _FIRST, 2),
    _Method("alltoall_base", "all_to_all_single", _SECOND, _FIRST, 4),
    _Method("all_to_all_single", "all_to_all_single", _SECOND, _FIRST, 4),
    _Method("alltoall", "all_to_all", _SECOND, _FIRST, 2),
)
_POINT_TO_POINT = (
    _Method("send", "send", _FIRST, None, None),
    _Method("recv", "recv", None, _FIRST, None),
    _Method("recv_anysource", "recv", None, _FIRST, None),
)
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")


def _tensors(args: tuple[Any, ...], index: int | None) -> list[torch.Tensor]:
    """The tensors of an argument: one, a list, or a list of lists."""
    if index is None or index >= len(args):
        return []
    found, left = [], [args[index]]
    while left:
        value = left.pop(0)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            left.extend(value)
    return found


def _collective(method: _Method, *, override: bool = False) -> Wrap:
    def read(group: Any, args: tuple[Any, ...]) -> Exchange:
        given = args[method.options] if method.options is not None and method.options < len(args) else None
        root = getattr(given, "rootRank", None) if method.one else None
        sources, targets = _tensors(args, method.sources), _tensors(args, method.targets)
        if root is not None and group.rank() != root:
            if method.one == "gives":
                sources = []
            else:
                targets = []
        return Exchange(
            method.op,
            group,
            sources,
            targets,
            root=root,
            options=given if method.op in _REDUCING else None,
            asynchronous=getattr(given, "asyncOp", None),
        )

    return _wrapper(read, override)


def _point_to_point(method: _Method, *, override: bool = False) -> Wrap:
    def read(group: Any, args: tuple[Any, ...]) -> Exchange:
        peer = None if method.name == "recv_anysource" else args[1]
        sources, targets = _tensors(args, method.sources), _tensors(args, method.targets)
        return Exchange(method.op, group, sources, targets, peer, asynchronous=not _in_blocking_call())

    return _wrapper(read, override)


def _in_blocking_call() -> bool:
    """Whether the caller is `send` or `recv`, which call `isend` and `irecv`; those have no options to tell by."""
    frame: FrameType | None = sys._getframe(4)
    for _ in range(5):
        if frame is None:
            break
        if frame.f_code.co_name in ("send", "recv") and frame.f_globals.get("__name__") == _C10D:
            return True
        frame = frame.f_back
    return False


class _Busy(threading.local):
    """Groups whose method is running in this thread: one method of torch may call another to do the same exchange."""

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self.overrides = 0
        """How many methods of classes of Python are running: what they call is part of their exchange."""


def _wrapper(read: Callable[[Any, tuple[Any, ...]], Exchange], override: bool = False) -> Wrap:
    def wrap(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
        busy = _BUSY

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            key = id(group)
            if busy.overrides or key in busy.groups:
                if not override:
                    _not_an_override(group, original)
                return original(group, *args, **kwargs)
            exchange = events.begin(read, group, (*args, *kwargs.values()))
            busy.groups.add(key)
            busy.overrides += override
            try:
                work = original(group, *args, **kwargs)
            finally:
                busy.groups.discard(key)
                busy.overrides -= override
            if exchange is not None:
                events.called(exchange, work)
            return work

        return method

    return wrap


_BUSY = _Busy()
# Where C++ finds no override of a method's newer name it looks for one of these.
_OLDER_NAMES = ("allgather_into_tensor_coalesced", "alltoall_base", "reduce_scatter_tensor_coalesced")


def _not_an_override(group: Any, original: Callable[..., Any]) -> None:
    """Show C++ the method of torch where a group of Python has inherited the wrapper of an older name.

    The two names' wrappers would otherwise find each other for ever. The newer one sees the exchange.
    """
    name, kind = original.__name__, type(group)
    own = kind.__mro__[: kind.__mro__.index(torch.distributed.ProcessGroup)]
    if own and name in _OLDER_NAMES and not any(name in vars(each) for each in own):
        setattr(kind, name, original)


def _as_method(name: str, wrap: Wrap) -> Wrap:
    """Give the wrapper the method's own name, by which pybind11 knows that an override is calling its base.

    A group or handle that is a class of Python finds the wrapper when C++ looks for an override of the method. Under
    another name it would be called for ever by what it calls.
    """

    def named(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
        wrapper: Any = wrap(original, events)
        wrapper.__code__ = wrapper.__code__.replace(co_name=name)
        return cast("Callable[..., Any]", wrapper)

    return named


def _waiting(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(work, *args, **kwargs)
        events.waited(work)
        return result

    return wait


def _start_coalescing(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    def start(group: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(group, *args, **kwargs)
        events.coalescing(group)
        return result

    return start


def _end_coalescing(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    def end(group: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(group, *args, **kwargs)
        events.coalesced(group, work)
        return work

    return end


def _patch(owner: str, name: str, wrap: Wrap, why: str) -> Patch:
    targets = (f"{_C10D}:{owner}.{name}",)
    return Patch(f"distributed.{owner}.{name}", targets, _as_method(name, wrap), phase="communication", why=why)


PATCHES = [
    *(_patch("ProcessGroup", m.name, _collective(m), "inputs and outputs of a collective") for m in _METHODS),
    *(
        _patch("ProcessGroup", m.name, _point_to_point(m), "tensors that are sent and received")
        for m in _POINT_TO_POINT
    ),
    _patch("ProcessGroup", "_start_coalescing", _start_coalescing, "several exchanges share one handle"),
    _patch("ProcessGroup", "_end_coalescing", _end_coalescing, "the shared handle"),
    _patch("Work", "wait", _waiting, "a result is complete after wait"),
    _patch("Work", "synchronize", _waiting, "as wait"),
]


def overrides() -> list[Patch]:
    """The same for what classes of Python override, of those that there are now."""
    wraps: dict[str, tuple[Wrap, str]] = {
        **{m.name: (_collective(m, override=True), "inputs and outputs of a collective") for m in _METHODS},
        **{m.name: (_point_to_point(m, override=True), "tensors sent and received") for m in _POINT_TO_POINT},
        "_start_coalescing": (_start_coalescing, "several exchanges share one handle"),
        "_end_coalescing": (_end_coalescing, "the shared handle"),
    }
    waits: dict[str, tuple[Wrap, str]] = {
        "wait": (_waiting, "a result is complete after wait"),
        "synchronize": (_waiting, "as wait"),
    }
    found = []
    for kind in derived_classes():
        known = wraps if issubclass(kind, torch.distributed.ProcessGroup) else waits
        own = [name for name in known if isinstance(vars(kind).get(name), FunctionType)]
        for name in own:
            target = f"{kind.__module__}:{kind.__qualname__}.{name}"
            wrap = _as_method(name, known[name][0])
            id_ = f"distributed.{kind.__qualname__}.{name}"
            found.append(Patch(id_, (target,), wrap, "communication", f"{known[name][1]}, overridden", owner=kind))
    return found
