"""Who looks at the monitor's figures as soon as they are on the host: alerts, live curves, the flight recorder.

The writer thread has the numbers of a step one copy after its end; it hands them to every watcher of the job before
it writes them. Training never waits for a watcher.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from msprobe_megatron.record.schema import Row


class StepRows(NamedTuple):
    """The monitor's rows of one step with their figures.

    ``row.slot`` is the line of a row in both arrays, -1 for a row without figures. Steps that watch the same things
    share one list of rows: what a watcher derives from a row it may keep by ``id(rows)``.
    """

    step: int
    rows: list[Row]
    floats: npt.NDArray[np.float64]
    """(slots, 5): min, max, sum, sumsq, absmax over the finite elements; NaN where nothing was measured."""
    counts: npt.NDArray[np.int64]
    """(slots, 4): NaN, +Inf, -Inf, zeros; -1 where nothing was measured."""
    digests: npt.NDArray[np.uint64] | None = None
    """(slots,): digests, where the monitor takes any."""


class Watcher(Protocol):
    """Something that is told of every watched step.

    Example::

        class Losses:
            def saw(self, rows: StepRows) -> None:
                for row in rows.rows:
                    if row.kind == "loss" and row.slot >= 0:
                        print(rows.step, row.name, rows.floats[row.slot, 2])

        job.watchers.append(Losses())
    """

    def saw(self, rows: StepRows) -> None:
        """A watched step is over. Runs in the writer thread; what it raises disarms the session as a fault."""
