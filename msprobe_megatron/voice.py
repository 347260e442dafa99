"""How a session speaks: one line on standard error and one event for what matters, one line on rank 0 for the log."""

from __future__ import annotations

import sys

from msprobe_megatron.record.directory import RunDirectory


class Voice:
    """Speaks for one rank of a run.

    Example::

        voice = Voice(directory, rank=3)
        voice.step = 7
        voice.say("disarmed after a fault in …", "fault")
    """

    def __init__(self, directory: RunDirectory, rank: int) -> None:
        self._directory, self._rank = directory, rank
        self.step = -1
        self.faults: list[str] = []

    def say(self, text: str, event: str) -> None:
        """One line on standard error, and an event of the running step."""
        print(f"msprobe [rank {self._rank}]: {text}", file=sys.stderr, flush=True)
        try:
            self._directory.append_event({"event": event, "rank": self._rank, "step": self.step, "text": text})
        except OSError as error:
            self.faults.append(f"events: {error}")

    def tell(self, text: str) -> None:
        """One line on rank 0's standard output, where it lands in the job's log."""
        if self._rank == 0:
            print(f"msprobe: {text}", flush=True)
