"""What the kit has on the host, by how long it stays: while any session is awake (`ROUTER`), while one session is
(`SessionPatches`), while a step is recorded (`StepPatches`).

Between recorded steps only the first two are there, and each of their wrappers compares one integer.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from msprobe_megatron.job.clock import Clock, inside_backward
from msprobe_megatron.job.patching.attributes import add_wrapper, remove_wrapper
from msprobe_megatron.job.patching.patch_set import PatchSet, declared
from msprobe_megatron.job.sites.comm.bus import COMM_BUS
from msprobe_megatron.job.sites.comm.collectives import MemoryWatch
from msprobe_megatron.patches.optimizer import wrap_step
from msprobe_megatron.topology import names


def megatron_schedules() -> bool:
    """Whether this process has imported Megatron's schedules; a plain torch loop has none to patch."""
    return "megatron.core.pipeline_parallel.schedules" in sys.modules


class Router:
    """Routes the process-wide schedule patches to the session whose model is running.

    Several models may train in one process (actor and critic, teacher and student); the schedules are module globals,
    so there is one set of patches and a table from model chunks to sessions.
    """

    def __init__(self) -> None:
        self._by_chunk: dict[int, Any] = {}
        self._patches: PatchSet | None = None

    def add(self, session: Any, chunks: Iterable[int]) -> None:
        """Route the chunks with these `id`s to `session`; the first session applies the patches."""
        if self._patches is None:
            self._patches = PatchSet(declared("functions"), self)
        if megatron_schedules():
            self._patches.apply()
            self._patches.verify()
        # A session without a model (API calls only) is registered under its own id.
        self._by_chunk.update(dict.fromkeys(list(chunks) or [id(session)], session))

    def remove(self, session: Any) -> None:
        """Unregister a session; the last one reverts the patches."""
        self._by_chunk = {key: value for key, value in self._by_chunk.items() if value is not session}
        if not self._by_chunk and self._patches is not None:
            self._patches.revert()

    def sessions(self) -> list[Any]:
        """The sessions of this process that are awake."""
        return list({id(session): session for session in self._by_chunk.values()}.values())

    def forget(self) -> None:
        """In a fork of the training process (a data-loader worker): observe, write and report nothing."""
        for session in self.sessions():
            with contextlib.suppress(Exception):  # there is no one to report it to
                session.leave()
        self._by_chunk.clear()

    def verify(self) -> list[str]:
        """Bind again what other code has overwritten; returns those targets."""
        return self._patches.verify() if self._patches is not None else []

    def ledger(self) -> list[dict[str, Any]]:
        """The outcome of each patch."""
        return self._patches.ledger() if self._patches is not None else []

    def session_of(self, model: Any) -> Any | None:
        """The session of this model (a chunk, or the list of chunks of a schedule)."""
        try:
            return self._find(model)
        except Exception as error:  # it is unknown whose model it was
            for session in self.sessions():
                session.fault(error, "session_of")
            return None

    def _find(self, model: Any) -> Any | None:
        chunk = model[0] if isinstance(model, list | tuple) and model else model
        found = self._by_chunk.get(id(chunk))
        if found is None and isinstance(chunk, nn.Module):
            found = self._by_chunk.get(id(names.unwrap(chunk)))
        return found


ROUTER = Router()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ROUTER.forget)


class SessionPatches:
    """While the session is awake: the route from the schedules, `optimizer.step`, and the model of a plain loop.

    `plain` is set where no Megatron schedule begins a step, so that the calls of the model have to.
    """

    def __init__(
        self,
        session: Any,
        chunks: Iterable[nn.Module],
        chunk_of: Mapping[int, int],
        optimizer: Any,
        *,
        plain: bool,
        forward_only: bool = False,
    ) -> None:
        self._session, self._chunks, self._chunk_of = session, list(chunks), chunk_of
        self._optimizer, self._plain, self._forward_only = optimizer, plain, forward_only
        self._undo: list[Callable[[], None]] = []
        self._applied = False

    def apply(self) -> None:
        """Install them. Idempotent."""
        if self._applied:
            return
        self._applied = True
        ROUTER.add(self._session, self._chunk_of)
        if self._forward_only:
            trains = self._optimizer is not None
            watched = [names.unwrap(chunk) for chunk in self._chunks]
            self._undo += [watch_passes(model, self._session, trains=trains) for model in watched]
            return
        if self._optimizer is not None:
            self._undo.append(wrap_step(self._optimizer, self._session))
        if self._plain:
            self._undo += [watch_forward(names.unwrap(chunk), self._session) for chunk in self._chunks]

    def revert(self) -> None:
        """Remove them. Idempotent."""
        self._applied = False
        ROUTER.remove(self._session)
        while self._undo:
            self._undo.pop()()


class StepPatches:
    """While a step is recorded: the patches of that phase, and a watch over what communication writes to.

    `plain` is set where there is no Megatron, whose schedules would otherwise be required.
    """

    def __init__(self, session: Any, *, plain: bool) -> None:
        patches = declared("recording")
        if plain:
            patches = [patch for patch in patches if not patch.id.startswith("schedules.")]
        self._patches = PatchSet(patches, session)
        self._memory = MemoryWatch(session.memory_changed)

    def apply(self, *, memory: bool) -> None:
        """Install the patches, and with `memory` the watch. Idempotent."""
        self._patches.apply()
        if memory:
            self._memory.install()
        else:
            self._memory.remove()

    def revert(self) -> None:
        """Remove everything. Idempotent."""
        self._memory.remove()
        self._patches.revert()

    def ledger(self) -> list[dict[str, Any]]:
        """The outcome of each patch, those of communication included."""
        return [*self._patches.ledger(), *COMM_BUS.ledger()]


class ForwardEvents(Protocol):
    """Is notified when the model of a plain loop runs: the session."""

    clock: Clock

    def forward_begin(self, model: nn.Module) -> None:
        """The model is called for training."""

    def outside_step(self) -> AbstractContextManager[None]:
        """While the model is called for something else than training."""

    def pass_begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A forward-only pass begins; False if it belongs to no step."""

    def pass_end(self, complete: bool) -> None:
        """The pass that `pass_begin` accepted has returned, or raised."""


def watch_forward(model: nn.Module, events: ForwardEvents) -> Callable[[], None]:
    """Notify `events` of every call of a model; returns a function that undoes it.

    In a loop without a Megatron schedule a step begins with the first of them. The wrapper runs before the model's
    hooks, so that those of the first forward see its arguments too. Forwards without gradients (evaluation) belong
    to no step.
    """

    def watching(original: Callable[..., Any]) -> Callable[..., Any]:
        # Named and bound like the method it hides: a copy or a pickle of the model then calls itself, unwatched.
        def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self is not model:
                return type(self)._call_impl(self, *args, **kwargs)  # type: ignore[no-untyped-call]
            if inside_backward():
                return original(*args, **kwargs)
            if not torch.is_grad_enabled():
                # An evaluation in another thread must not pause the step, which goes on meanwhile.
                with events.clock.elsewhere() or events.outside_step():
                    return original(*args, **kwargs)
            events.forward_begin(self)
            return original(*args, **kwargs)

        return types.MethodType(_call_impl, model)

    add_wrapper(model, "_call_impl", watching)
    return lambda: remove_wrapper(model, "_call_impl", watching)


def watch_passes(model: nn.Module, events: ForwardEvents, *, trains: bool) -> Callable[[], None]:
    """Notify `events` of every forward-only pass of a model; returns a function that undoes it.

    With `trains` (the session was given an optimizer) calls with gradients are training and no pass.
    """

    def watching(original: Callable[..., Any]) -> Callable[..., Any]:
        def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self is not model:
                return type(self)._call_impl(self, *args, **kwargs)  # type: ignore[no-untyped-call]
            training = inside_backward() or (trains and torch.is_grad_enabled())
            if training or not events.pass_begin(self, args, kwargs):
                return original(*args, **kwargs)
            complete = False
            try:
                result = original(*args, **kwargs)
                complete = True
            finally:
                events.pass_end(complete)
            return result

        return types.MethodType(_call_impl, model)

    add_wrapper(model, "_call_impl", watching)
    return lambda: remove_wrapper(model, "_call_impl", watching)
