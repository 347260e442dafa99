"""Counts of the simulated device over a stretch of code, and who caused each wait of the host."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

_PACKAGE = Path(__file__).parents[3]
# Inside the package, but a job rather than the kit: the demo, the benchmarks, and this device.
_NOT_THE_KIT = (str(_PACKAGE / "lab"), str(_PACKAGE / "hosts"))


class Frame(NamedTuple):
    """One line of a Python stack."""

    file: str
    line: int
    function: str

    @property
    def of_the_kit(self) -> bool:
        """Whether the line belongs to what observes a job, not to the job."""
        return self.file.startswith(str(_PACKAGE)) and not self.file.startswith(_NOT_THE_KIT)


class Entry(NamedTuple):
    """One launch ("launch"), wait of the host ("sync") or unordered access ("race"), innermost frame first."""

    kind: str
    what: str
    dtype: str
    numel: int
    thread: str
    frames: tuple[Frame, ...]

    @property
    def of_the_kit(self) -> bool:
        """Whether any frame is the kit's."""
        return any(frame.of_the_kit for frame in self.frames)

    def __str__(self) -> str:
        own = [frame for frame in self.frames if frame.of_the_kit] or list(self.frames)
        where = " < ".join(f"{Path(frame.file).name}:{frame.line}({frame.function})" for frame in own[:4])
        return f"{self.kind} {self.what} {self.dtype}[{self.numel}] on {self.thread}: {where}"


class Trace:
    """What the device did while the trace was open. Launches are counted always, and kept as entries on request.

    Only one trace is open at a time.
    """

    def __init__(self, *, launches: bool = False) -> None:
        self.entries: list[Entry] = []
        self.counts: dict[str, int] = {}
        self._kinds = {"sync", "race", *(("launch",) if launches else ())}

    def __enter__(self) -> Trace:
        loaded = _extension()
        loaded.reset()
        loaded.trace(self._add)
        return self

    def __exit__(self, *_exc: object) -> None:
        loaded = _extension()
        loaded.trace(None)
        self.counts = dict(loaded.counts())

    @property
    def waits(self) -> list[Entry]:
        """Each time the host waited for the device."""
        return [entry for entry in self.entries if entry.kind == "sync"]

    @property
    def races(self) -> list[Entry]:
        """Each access to memory of another stream without a wait for it."""
        return [entry for entry in self.entries if entry.kind == "race"]

    def of_the_kit(self, kind: str, thread: str | None = "MainThread") -> list[Entry]:
        """Entries that the kit caused, on one thread or (None) on any; the autograd engine's is not the main one."""
        return [
            entry
            for entry in self.entries
            if entry.kind == kind and entry.of_the_kit and (thread is None or entry.thread == thread)
        ]

    def sites(self, kind: str) -> Counter[str]:
        """How often each place caused an entry of a kind."""
        return Counter(str(entry) for entry in self.entries if entry.kind == kind)

    def _add(self, kind: str, what: str, dtype: str, numel: int) -> None:
        if kind in self._kinds:
            thread = threading.current_thread().name
            self.entries.append(Entry(kind, what, dtype, numel, thread, _frames(sys._getframe().f_back)))


def _frames(frame: FrameType | None, most: int = 60) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    while frame is not None and len(frames) < most:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(frames)


def _extension() -> Any:
    from msprobe_megatron.hosts.rehearsal import simulated_device

    return simulated_device.extension()
