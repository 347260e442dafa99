"""torch.distributed: collectives, sends and receives, at the methods of the process group that do them.

Megatron binds functions of torch.distributed to names of its own when it is imported, and torch compares `P2POp.op`
with `isend` and `irecv` by identity; the methods of `ProcessGroup` lie below all of them. What was asked for is
complete when `Work.wait` returns. The wrappers hand everything on as it is, and what comes back too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch

from msprobe_megatron.patching import Patch, Wrap
from msprobe_megatron.sites.exchanges import Exchange

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


# Names of several releases: a method that is not there is a line in the ledger.
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


def _collective(method: _Method) -> Wrap:
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

    return _wrapper(read)


def _point_to_point(method: _Method) -> Wrap:
    def read(group: Any, args: tuple[Any, ...]) -> Exchange:
        peer = None if method.name == "recv_anysource" else args[1]
        sources, targets = _tensors(args, method.sources), _tensors(args, method.targets)
        return Exchange(method.op, group, sources, targets, peer, asynchronous=not _in_blocking_call())

    return _wrapper(read)


def _in_blocking_call() -> bool:
    """Whether `send` or `recv` of torch.distributed wants it: they call `isend` and `irecv`, which have no options."""
    frame: FrameType | None = sys._getframe(4)
    for _ in range(5):
        if frame is None:
            break
        if frame.f_code.co_name in ("send", "recv") and frame.f_globals.get("__name__") == _C10D:
            return True
        frame = frame.f_back
    return False


def _wrapper(read: Callable[[Any, tuple[Any, ...]], Exchange]) -> Wrap:
    def wrap(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            exchange = events.begin(read, group, (*args, *kwargs.values()))
            work = original(group, *args, **kwargs)
            if exchange is not None:
                events.called(exchange, work)
            return work

        return method

    return wrap


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
    return Patch(f"distributed.{owner}.{name}", (f"{_C10D}:{owner}.{name}",), wrap, phase="communication", why=why)


PATCHES = [
    *(_patch("ProcessGroup", m.name, _collective(m), "what a collective gives and gets") for m in _METHODS),
    *(_patch("ProcessGroup", m.name, _point_to_point(m), "what is sent and received") for m in _POINT_TO_POINT),
    _patch("ProcessGroup", "_start_coalescing", _start_coalescing, "several exchanges share a handle"),
    _patch("ProcessGroup", "_end_coalescing", _end_coalescing, "the handle that they share"),
    _patch("Work", "wait", _waiting, "a result is complete when it has been waited for"),
    _patch("Work", "synchronize", _waiting, "waits too"),
]
