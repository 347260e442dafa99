"""Lines for the user: the one place that prints in a training process, and the events that go with the lines.

A line is never worth a job: a stream that is missing, closed, full or piped into a program that has ended is
ignored, and characters that the stream cannot encode are escaped.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TextIO

from msprobe_megatron.run_directory.directory import RunDirectory, read_events


def warn(text: str, rank: int | None = None) -> None:
    """Print one line on standard error; `rank` where a line of another rank would say something else."""
    prefix = "msprobe" if rank is None else f"msprobe [rank {rank}]"
    _print(f"{prefix}: {text}", sys.stderr)


class Messages:
    """The messages of one rank of a run. `step` is set by the session and is written with every event."""

    def __init__(self, directory: RunDirectory, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self.step = -1
        self.faults: list[str] = []

    def report(self, text: str, event: str) -> None:
        """Print one line on standard error, and append it to the run as an event of this kind."""
        warn(text, self.rank)
        try:
            self.directory.append_event({"event": event, "rank": self.rank, "step": self.step, "text": text})
        except Exception as error:  # a full disk, or no memory left: reporting must not make it worse
            self.faults.append(f"events: {type(error).__name__}: {error}")

    def log(self, text: str) -> None:
        """Print one line on rank 0's standard output, where it lands in the job's log."""
        if self.rank == 0:
            _print(f"msprobe: {text}", sys.stdout)


def last_line(steps: int, run: Path) -> str:
    """The line that ends a run: how much was recorded, and the command to look at it."""
    recorded = f"{steps} step{'' if steps == 1 else 's'} recorded"
    alerts = sum(event.get("event") == "alert" for event in read_events(run))
    if not alerts:
        return f"{recorded}; to inspect the run: msprobe-megatron summary {run}"
    recorded += f", {alerts} alert{'' if alerts == 1 else 's'}"
    return f"{recorded}; to find the first cause: msprobe-megatron diagnose {run}"


def _print(line: str, stream: TextIO | None) -> None:
    if stream is None:  # print(file=None) would go to standard output
        return
    with contextlib.suppress(Exception):
        try:
            print(line, file=stream, flush=True)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
