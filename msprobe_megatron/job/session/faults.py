"""The barrier between an error of the kit and the training code: the guard around the session's own methods.

A fault disables the session and is reported once. Under `strict` it stops the job instead: the rank that has it
raises `ProbeFault`; the others fail in whatever they were waiting for, and then report which rank stopped and why.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from msprobe_megatron.config import ConfigError
from msprobe_megatron.job.devices import BackendError
from msprobe_megatron.job.messages import Messages
from msprobe_megatron.job.patching.attributes import PatchError
from msprobe_megatron.run_directory.directory import RunDirectoryError, read_events

REFUSALS = (ConfigError, PatchError, RunDirectoryError, BackendError)
"""What was requested cannot be done: reported before training begins, never a fault."""
_Method = TypeVar("_Method", bound=Callable[..., Any])
_MOST_KEPT = 20


class ProbeFault(Exception):
    """An internal error of the kit under `strict: true`; without it training never sees one."""


class FaultGuard:
    """The first fault of a session, and what follows from it."""

    def __init__(self, messages: Messages, strict: bool) -> None:
        self._messages, self._strict = messages, strict
        self._thread = threading.get_ident()
        self.step_lock = threading.RLock()
        """Held while a step begins or ends: other threads of the host may run the model at the same time."""
        self._raised = False
        self.first = ""

    def take(self, error: BaseException, where: str) -> bool:
        """Record a fault and report the first one; returns whether this is the training thread, which may clean up."""
        first, self.first = not self.first, self.first or type(error).__name__
        with contextlib.suppress(Exception):  # no memory left, or an error that cannot be printed
            text = f"{where}: {type(error).__name__}: {error}"
            if len(self._messages.faults) < _MOST_KEPT:
                self._messages.faults.append(text)
            if first:
                self.first = text
                effect = "the job stops (strict: true)" if self._strict else "training continues without it"
                self._messages.report(f"probe disabled by an internal error in {text}; {effect}", "fault")
        return threading.get_ident() == self._thread

    def raise_if_strict(self, error: BaseException | None = None) -> None:
        """Under `strict`, raise the first fault into the training code, once."""
        if self._strict and self.first and not self._raised:
            self._raised = True
            raise ProbeFault(f"msprobe: {self.first} (strict: true)") from error

    def after_fork(self) -> None:
        """In a forked child, where the thread that holds the lock does not exist."""
        self.step_lock = threading.RLock()

    def report_stop_of_other_rank(self) -> None:
        """Training failed on this rank: under `strict`, report if another rank's fault stopped the job."""
        if not self._strict or self.first:
            return
        try:
            events = read_events(self._messages.directory.path)
        except OSError:
            return
        for event in events:
            if event.get("event") == "fault" and event.get("rank") != self._messages.rank:
                self._messages.report(f"rank {event.get('rank')} stopped the job: {event.get('text')}", "stopped")
                return


def exclusive(method: _Method) -> _Method:
    """One thread at a time in the methods of a session that begin and end a step."""

    @functools.wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._guard.step_lock:
            return method(self, *args, **kwargs)

    return locked  # type: ignore[return-value]


def guarded(method: _Method) -> _Method:
    """An error inside `method` disables the session instead of reaching the training code."""

    @functools.wraps(method)
    def guard(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except ProbeFault:
            raise
        except Exception as error:
            self.fault(error, method.__name__.lstrip("_"))
            return None

    return guard  # type: ignore[return-value]
