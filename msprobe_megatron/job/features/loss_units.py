"""Losses in the units of Megatron's log: a loss function that reports [sum over tokens, tokens] means their quotient.

The two are recorded as rows of one name with the paths ``0`` and ``1``. A sum grows with the tokens that are not
masked, so that neither an alert nor a curve may take it for the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from msprobe_megatron.run_directory.schema import Row


def is_token_sum(row: Row) -> bool:
    """Whether a row may be the sum of such a pair."""
    return row.kind == "loss" and row.io == "output" and row.path == "0"


def token_counts(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
    """For every row the index of the row that counts its tokens; -1 for rows that are no sum of losses."""
    counts = {
        (row.name, row.microbatch, row.phase, row.vpp): index
        for index, row in enumerate(rows)
        if row.kind == "loss" and row.io == "output" and row.path == "1"
    }
    keys = [(row.name, row.microbatch, row.phase, row.vpp) if is_token_sum(row) else None for row in rows]
    return np.array([-1 if key is None else counts.get(key, -1) for key in keys], np.int64)
