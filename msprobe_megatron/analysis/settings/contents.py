"""What two runs started from: weights and batch of the first step that both recorded, held against each other.

By digests where both have them, else by statistics, in any layout.
"""

from __future__ import annotations

from typing import Any

import duckdb
import numpy as np

from msprobe_megatron.analysis.compare.merge import merge_query
from msprobe_megatron.analysis.load.run import Run

_CLOSE = 1e-5
_MASK = (1 << 64) - 1

_WEIGHTS = """
select name, digest, sum, sumsq, numel from ({merged}) where kind = 'parameter' and reason = '' order by name
"""
# Token ids are whole numbers: their sums are exact however the batch is cut.
_DATA = """
select path, sum(sum), sum(sumsq), sum(numel) from ({merged})
where name = 'model' and io = 'input' and path in ('input_ids', 'labels') and kind = 'activation' and reason = ''
group by path order by path
"""


def contents(run: Run, step: int) -> tuple[dict[str, tuple[Any, ...]], dict[str, tuple[Any, ...]]]:
    """Weights and data of a step by name: digest or statistics."""
    connection = duckdb.connect()
    merged = merge_query(connection, run, step, "c", kinds=("parameter", "activation"))
    weights = connection.execute(_WEIGHTS.replace("{merged}", merged)).fetchall()
    data = connection.execute(_DATA.replace("{merged}", merged)).fetchall()
    return {row[0]: row[1:] for row in weights}, {row[0]: row[1:] for row in data}


def differing_weights(left: dict[str, tuple[Any, ...]], right: dict[str, tuple[Any, ...]]) -> list[str]:
    """Names of weights that both have, of one size, and that are not the same."""
    both = [name for name in left if name in right and left[name][3] == right[name][3]]
    return [name for name in both if not _same(left[name], right[name])]


def _same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    if left[0] is not None and right[0] is not None:
        return bool(left[0] == right[0])
    size = max(np.sqrt(max(left[2] or 0, right[2] or 0)), 1e-300)
    norms = abs(np.sqrt(left[2] or 0) - np.sqrt(right[2] or 0)) / size
    sums = abs((left[1] or 0) - (right[1] or 0)) / (size * np.sqrt(max(left[3] or 1, 1)))
    return bool(max(norms, sums) < _CLOSE)


def digest_text(weights: dict[str, tuple[Any, ...]]) -> str:
    """All weights as short text: their combined digest, or their number."""
    digests = [values[0] for values in weights.values()]
    if not digests or any(digest is None for digest in digests):
        return f"{len(weights)} tensors"
    return f"{sum(int(digest) for digest in digests) & _MASK:016x}"
