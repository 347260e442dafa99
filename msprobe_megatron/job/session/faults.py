"""What stands between a fault of the kit and the training code: the guard around the session's own methods.

A fault disarms the session and is told once. Under `strict` it stops the job instead: the rank that has it raises
`ProbeFault`; the others fail in whatever they were waiting for, and say then which rank stopped and why.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from msprobe_megatron.backends import BackendError
from msprobe_megatron.config import ConfigError
from msprobe_megatron.patching import PatchError
from msprobe_megatron.record.directory import RunDirectoryError
from msprobe_megatron.record.events import read_events
from msprobe_megatron.voice import Voice

REFUSALS = (ConfigError, PatchError, RunDirectoryError, BackendError)
"""What is asked cannot be done: told before training begins, never a fault."""
_Method = TypeVar("_Method", bound=Callable[..., Any])
_KEPT = 20


class ProbeFault(Exception):
    """A fault of the kit under `strict: true`; without it training never sees one."""


class FaultGuard:
    """The first fault of a session, and what follows from it.

    Example::

        guard = FaultGuard(voice, strict=False)
        if guard.take(error, "writer"):
            disarm()
            guard.stop(error)
    """

    def __init__(self, voice: Voice, strict: bool) -> None:
        self._voice, self._strict = voice, strict
        self._thread = threading.get_ident()
        self.turn = threading.RLock()
        """Held while a step begins or ends: other threads of the host may run the model just then."""
        self._stopped = False
        self.first = ""

    def take(self, error: BaseException, where: str) -> bool:
        """Note a fault, and tell of the first one; whether this is the thread that trains, which may disarm at once."""
        first, self.first = not self.first, self.first or type(error).__name__
        with contextlib.suppress(Exception):  # no memory left, or an error that cannot be printed
            text = f"{where}: {type(error).__name__}: {error}"
            if len(self._voice.faults) < _KEPT:
                self._voice.faults.append(text)
            if first:
                self.first = text
                after = "the job stops (strict: true)" if self._strict else "training goes on unobserved"
                self._voice.say(f"disarmed after a fault in {text}; {after}", "fault")
        return threading.get_ident() == self._thread

    def stop(self, error: BaseException | None = None) -> None:
        """Under `strict`, once: raise what was noted into the training code."""
        if self._strict and self.first and not self._stopped:
            self._stopped = True
            raise ProbeFault(f"msprobe: {self.first} (strict: true)") from error

    def forked(self) -> None:
        """In a forked child, where the thread that holds the turn does not exist."""
        self.turn = threading.RLock()

    def others_stopped(self) -> None:
        """Training failed on this rank: under `strict`, say so if it did because another rank stopped the job."""
        if not self._strict or self.first:
            return
        try:
            events = read_events(self._voice.directory.path)
        except OSError:
            return
        for event in events:
            if event.get("event") == "fault" and event.get("rank") != self._voice.rank:
                self._voice.say(f"rank {event.get('rank')} stopped the job: {event.get('text')}", "stopped")
                return


def alone(method: _Method) -> _Method:
    """One thread at a time in the methods of a session that begin and end a step."""

    @functools.wraps(method)
    def waited(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._guard.turn:
            return method(self, *args, **kwargs)

    return waited  # type: ignore[return-value]


def guarded(method: _Method) -> _Method:
    """A fault inside `method` disarms the session instead of reaching the training code."""

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
