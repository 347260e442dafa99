"""Which rows of a step to keep when only the origin of NaN and Inf is asked for.

Runs in the writer thread, when the counts have arrived: training never waits to know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from msprobe_megatron.record.schema import Row


def origin(rows: Sequence[Row], counts: npt.NDArray[np.int64]) -> list[Row]:
    """The call that was the first to show a NaN or an Inf, with its inputs; empty if none did.

    Rows of one call share name, kind, phase, microbatch and virtual stage.

    Example::

        origin(batch.rows, counts)
    """
    bad = np.asarray((counts[:, :3] > 0).any(axis=1))
    first = next((row for row in rows if row.slot >= 0 and bad[row.slot]), None)
    if first is None:
        return []
    return [row for row in rows if _call(row) == _call(first)]


def _call(row: Row) -> tuple[object, ...]:
    return row.name, row.kind, row.phase, row.microbatch, row.vpp
