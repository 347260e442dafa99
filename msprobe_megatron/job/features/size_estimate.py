"""How much a run is going to write, said once at its start: measured on the first step that is on disk.

A part hands an `Announcement` to the writer behind its first step (dump), or is told by its file (monitor). The line
goes to the job's log, the figures into the ledger; nobody has to wait for a full disk to know.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from msprobe_megatron.config import StepSelection
from msprobe_megatron.control import leader
from msprobe_megatron.parts import Job
from msprobe_megatron.record.directory import RunDirectory
from msprobe_megatron.topology import host


class Announcer:
    """Says for one part what a step takes on this rank, and all steps that were asked for.

    Example::

        announcer = Announcer(job, "dump", "recorded")
        announcer.say(1_200_000, steps=20)
        announcer.ledger        # {"bytes_a_step": 1200000, "steps": 20, "bytes": 24000000}
    """

    def __init__(self, job: Job, part: str, word: str) -> None:
        self._job, self._part, self._word = job, part, word
        self.ledger: dict[str, Any] = {}

    def say(self, bytes_a_step: int, steps: int | None, once: int = 0) -> None:
        """Announce, the first time only; ``once`` are bytes that come on top, whatever the number of steps."""
        if self.ledger:
            return
        total = None if steps is None else once + bytes_a_step * steps
        self.ledger = {"bytes_a_step": bytes_a_step, "steps": steps, "bytes": total}
        if self._job.where.rank == leader(self._job.where, self._job.config.ranks):
            with contextlib.suppress(Exception):  # a log that is closed is no reason to stop a job
                print(f"msprobe: {self._text(bytes_a_step, steps, total)}", file=sys.stdout, flush=True)

    def _text(self, bytes_a_step: int, steps: int | None, total: int | None) -> str:
        text = f"{self._part}: about {readable(bytes_a_step)} a {self._word} step on this rank"
        if total is not None:
            text += f", {readable(total)} for the {steps} asked"
        limit = self._job.config.limits.disk
        share = None if limit is None else limit // self._job.where.world
        if share is not None and (total is None or total > share):
            text += f"; limits.disk leaves room for {readable(share)}, about {share // max(1, bytes_a_step)} steps"
        return text


class Announcement:
    """Goes through the writer's queue behind the first step, and measures what that step has left on the disk.

    Example::

        job.submit(Announcement(announcer, step=10, steps=20))
    """

    nbytes = 0

    def __init__(self, announcer: Announcer, step: int, steps: int | None) -> None:
        self.step = step
        self._announcer, self._steps = announcer, steps

    def coming(self, last: int) -> int:
        """It writes nothing."""
        return 0

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Look at the files of the step."""
        folder = directory.path / f"step_{self.step:06d}" / f"rank_{identity['rank']:05d}"
        sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)}
        # Later steps name the same sites, by a link.
        once = sizes.pop("sites.json", 0)
        self._announcer.say(sum(sizes.values()), self._steps, once)
        return 0

    def count(self, counts: Any) -> None:
        """Nothing to count."""

    def drop(self, counts: Any) -> None:
        """Nothing to count."""


def steps_asked(job: Job, steps: StepSelection, first: int) -> int | None:
    """How many steps of a selection come from ``first`` on; None where neither it nor the job's length tells.

    Steps that stand in two ranges of different strides count twice.

    Example::

        steps_asked(job, parse_steps("10,20-22"), first=10)      # 4
    """
    arguments = job.arguments if job.arguments is not None else host.megatron_arguments()
    iterations = getattr(arguments, "train_iters", None)
    final = iterations - 1 if isinstance(iterations, int) and iterations > 0 else None
    found = 0
    for span in steps.spans:
        begin = span.next_from(first)
        end = min((n for n in (span.last, final) if n is not None), default=None)
        if end is None:
            return None
        if begin is not None and begin <= end:
            found += (end - begin) // span.stride + 1
    return found


def readable(count: int) -> str:
    """Bytes for people.

    Example::

        >>> readable(1_234_567)
        '1.2 MB'
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
