"""How much a run is going to write, reported once at its start: measured on the first step that is on disk.

The dump submits a `FirstStepBatch` behind its first step; the monitor is called back with its first file. The line goes
to the job's log (``msprobe: dump: ~57.4 kB per recorded step on this rank, ~3.6 MB for the 60 requested steps``), the
numbers into the ledger.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from msprobe_megatron.config import StepSelection
from msprobe_megatron.job.control import leader
from msprobe_megatron.job.features.feature import JobContext
from msprobe_megatron.job.record.writer import Batch
from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.topology.host import framework


class SizeEstimate:
    """Reports the size of one step on this rank, and of all requested steps, for one feature."""

    def __init__(self, job: JobContext, feature: str, step_word: str) -> None:
        self._job, self._feature, self._step_word = job, feature, step_word
        self.ledger: dict[str, Any] = {}

    def report(self, bytes_per_step: int, steps: int | None, once: int = 0) -> None:
        """Print and note the estimate, the first time only; ``once`` are bytes that do not depend on the steps."""
        if self.ledger:
            return
        total = None if steps is None else once + bytes_per_step * steps
        self.ledger = {"bytes_a_step": bytes_per_step, "steps": steps, "bytes": total}
        if self._job.where.rank == leader(self._job.where, self._job.config.ranks):
            with contextlib.suppress(Exception):  # a log that is closed is no reason to stop a job
                print(f"msprobe: {self._text(bytes_per_step, steps, total)}", file=sys.stdout, flush=True)

    def _text(self, bytes_per_step: int, steps: int | None, total: int | None) -> str:
        text = f"{self._feature}: ~{readable(bytes_per_step)} per {self._step_word} step on this rank"
        if total is not None:
            text += f", ~{readable(total)} for the {steps} requested step{'' if steps == 1 else 's'}"
        limit = self._job.config.limits.disk
        share = None if limit is None else limit // self._job.where.world
        if share is not None and (total is None or total > share):
            text += f"; limits.disk leaves room for {readable(share)}, ~{share // max(1, bytes_per_step)} steps"
        return text


class FirstStepBatch(Batch):
    """Follows the first step through the writer's queue and measures the files that the step has left on disk."""

    def __init__(self, estimate: SizeEstimate, step: int, steps: int | None) -> None:
        self._estimate, self._step, self._steps = estimate, step, steps

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Measure the files of the step."""
        if directory.allowance is not None and directory.allowance.refused:
            return 0  # the first step is not whole: its size would say too little
        folder = directory.path / f"step_{self._step:06d}" / f"rank_{identity['rank']:05d}"
        if not (folder / "records.parquet").exists():  # dropped, and counted
            return 0
        sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)}
        # Later steps share this file by a link.
        once = sizes.pop("sites.json", 0)
        self._estimate.report(sum(sizes.values()), self._steps, once)
        return 0


def requested_steps(job: JobContext, steps: StepSelection, first: int) -> int | None:
    """How many steps of a selection come from ``first`` on; None if neither it nor the job has a known end."""
    arguments = job.arguments if job.arguments is not None else framework.megatron_arguments()
    iterations = getattr(arguments, "train_iters", None)
    return steps.count(first, iterations - 1 if isinstance(iterations, int) and iterations > 0 else None)


def readable(count: int) -> str:
    """A number of bytes for people.

    Example::

        >>> readable(1_234_567)
        '1.2 MB'
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
