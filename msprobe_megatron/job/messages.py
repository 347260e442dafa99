"""How a session speaks: one line on standard error and one event for what matters, one line on rank 0 for the log."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TextIO

from msprobe_megatron.record.directory import RunDirectory
from msprobe_megatron.record.events import read_events


class Voice:
    """Speaks for one rank of a run.

    Example::

        voice = Voice(directory, rank=3)
        voice.step = 7
        voice.say("disarmed after a fault in …", "fault")
    """

    def __init__(self, directory: RunDirectory, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self.step = -1
        self.faults: list[str] = []

    def say(self, text: str, event: str) -> None:
        """One line on standard error, and an event of the running step."""
        _print(f"msprobe [rank {self.rank}]: {text}", sys.stderr)
        try:
            self.directory.append_event({"event": event, "rank": self.rank, "step": self.step, "text": text})
        except Exception as error:  # a full disk, or no memory left: the one who speaks is in trouble already
            self.faults.append(f"events: {type(error).__name__}: {error}")

    def tell(self, text: str) -> None:
        """One line on rank 0's standard output, where it lands in the job's log."""
        if self.rank == 0:
            _print(f"msprobe: {text}", sys.stdout)


def last_line(steps: int, run: Path) -> str:
    """What is said when a run ends: how much there is, and the command to go on with.

    Example: ``last_line(12, Path("probe_out"))``.
    """
    alerts = sum(event.get("event") == "alert" for event in read_events(run))
    if not alerts:
        return f"{steps} steps recorded; look at them: msprobe-megatron summary {run}"
    words = f"{alerts} alert{'' if alerts == 1 else 's'}"
    return f"{steps} steps recorded, {words}; what came first and why: msprobe-megatron diagnose {run}"


def _print(line: str, stream: TextIO | None) -> None:
    # A log that is closed, full or piped into a program that has ended is no reason to stop a job.
    with contextlib.suppress(Exception):
        print(line, file=stream, flush=True)
