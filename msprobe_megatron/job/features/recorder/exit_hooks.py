"""Calls listeners when the process is about to exit because of a signal or an uncaught exception.

A signal wakes a dedicated thread through Python's wake-up descriptor, even while the training thread is blocked in C
code (a collective that hangs). Then the previous handler of the signal runs, or its default action. One instance serves
all sessions of a process; it disables itself in forked children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

Listener = Callable[[str], None]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PATIENCE = 2.0
"""Seconds that the training thread waits for listeners before the signal is passed on."""
_ENDS_BY_DEFAULT = (signal.SIGTERM, signal.SIGINT)


class ExitHooks:
    """Calls listeners with a reason (`signal SIGTERM`, `exception ValueError`), from its own thread or the main one."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._fd_before = -1
        self._hook_before: Callable[..., Any] | None = None
        self._handled = threading.Event()
        self._called = threading.Event()
        self._fork_watched = False

    def add(self, listener: Listener, *, signals: bool) -> list[str]:
        """Register `listener`; returns what could not be armed, and why."""
        if self._hook_before is None:
            self._hook_before, sys.excepthook = sys.excepthook, self._uncaught
        if not self._fork_watched:
            self._fork_watched = True
            os.register_at_fork(after_in_child=self._forked)
        self._listeners.append(listener)
        if not signals or self._pipe is not None:
            return []
        if threading.current_thread() is not threading.main_thread():
            return ["signals are not watched: handlers can be set in the main thread only, and this is another"]
        return self._watch_signals()

    def remove(self, listener: Listener) -> None:
        """Unregister a listener; the last one restores handlers and excepthook. Idempotent."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        if not self._listeners:
            self._restore()

    def _watch_signals(self) -> list[str]:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._pipe = (reader, writer)
        foreign = caught_elsewhere()
        notes = []
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before is None or (number in foreign and before is signal.SIG_DFL):
                notes.append(f"{number.name} is not watched: other code than Python's handles it")
                continue
            self._before[number] = before
            signal.signal(number, self._handle)
        self._fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), name="msprobe-signals", daemon=True).start()
        return notes

    def _listen(self, reader: int) -> None:
        while True:
            try:
                number = os.read(reader, 1)
            except OSError:
                number = b""
            if number in (b"", b"\0"):
                with contextlib.suppress(OSError):
                    os.close(reader)
                return
            if self._fd_before >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._fd_before, number)
            if number[0] in self._before:
                self._call(f"signal {signal.Signals(number[0]).name}")
                self._called.set()
                self._default_if_stuck(number[0])

    def _default_if_stuck(self, number: int) -> None:
        """The main thread is blocked in C code and cannot run its handler: trigger the default action from here."""
        if self._before.get(number) is not signal.SIG_DFL or number not in _ENDS_BY_DEFAULT:
            return
        if signal.getsignal(number) != self._handle:  # a later handler decides
            return
        if self._handled.wait(PATIENCE / 2):
            return
        library = ctypes.CDLL(None)
        library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        library.signal.restype = ctypes.c_void_p
        library.signal(number, None)
        os.kill(os.getpid(), number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread: wait for the listeners, then pass the signal on."""
        called = self._called.wait(PATIENCE) if self._wakes_us() else self._call_here(number)
        self._called.clear()
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif before is signal.SIG_DFL and number in _ENDS_BY_DEFAULT and called:
            self._handled.set()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _wakes_us(self) -> bool:
        """True if the wake-up descriptor is still ours; an event loop replaces it."""
        if self._pipe is None:
            return False
        current = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if current != self._pipe[1]:
            signal.set_wakeup_fd(current)
        return current == self._pipe[1]

    def _call_here(self, number: int) -> bool:
        self._call(f"signal {signal.Signals(number).name}")
        return True

    def _call(self, reason: str) -> None:
        for listener in list(self._listeners):
            # A failing listener must not change how the process exits.
            with contextlib.suppress(Exception):
                listener(reason)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._call(f"exception {kind.__name__}")
        (self._hook_before or sys.__excepthook__)(kind, error, trace)

    def _restore(self) -> None:
        if self._hook_before is not None:
            if sys.excepthook == self._uncaught:
                sys.excepthook = self._hook_before
            self._hook_before = None
        if self._pipe is None or threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        if self._wakes_us():
            signal.set_wakeup_fd(self._fd_before)
        writer = self._pipe[1]
        self._pipe, self._before, self._fd_before = None, {}, -1
        with contextlib.suppress(OSError):
            os.write(writer, b"\0")
            os.close(writer)

    def _forked(self) -> None:
        """In a forked child: its signals are its own, and our thread does not exist there."""
        self._listeners = []
        pipe, self._pipe = self._pipe, None
        if self._hook_before is not None:
            sys.excepthook, self._hook_before = self._hook_before, None
        if pipe is None:
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        # Not the previous descriptor either: it belongs to the parent.
        signal.set_wakeup_fd(-1)
        self._before, self._fd_before = {}, -1


def caught_elsewhere() -> set[int]:
    """Signals that have a handler in this process according to the kernel; empty if /proc does not say.

    Example::

        >>> signal.SIGUSR1 in caught_elsewhere()
        False
    """
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return set()
    mask = next((int(line.split()[1], 16) for line in text.splitlines() if line.startswith("SigCgt:")), 0)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


EXIT_HOOKS = ExitHooks()
"""The one instance of the process."""
