"""The loss in the units of Megatron's log.

A loss function reports either the mean of a microbatch, or [sum over tokens, number of tokens], which are recorded as
the paths ``0`` and ``1`` of one name. The log shows the mean of the former over microbatches, and of the latter the sum
of sums over the sum of counts, over microbatches and data-parallel ranks; so does this.
"""

from __future__ import annotations

from typing import Any

import duckdb

SQL_LOG_LOSS = """
select step, name,
    case when bool_or(path = '1')
         then sum(sum) filter (where path = '0') / nullif(sum(sum) filter (where path = '1'), 0)
         else avg(sum / nullif(numel, 0)) end as value,
    sum(n_nan + n_posinf + n_neginf) as non_finite
from {rows}
where kind = 'loss' and io = 'output' and phase = 'forward' and path in ('', '0', '1')
group by step, name order by name, step
"""
"""Steps, names and values of the losses of a run; ``{rows}`` are its rows, of all ranks."""


def log_losses(connection: duckdb.DuckDBPyConnection, rows: str) -> dict[str, list[tuple[int, float]]]:
    """Every reported loss by name, as (step, value); NaN where the step had one."""
    found: dict[str, list[tuple[int, float]]] = {}
    fetched: list[tuple[Any, ...]] = connection.execute(SQL_LOG_LOSS.format(rows=rows)).fetchall()
    for step, name, value, non_finite in fetched:
        number = float("nan") if non_finite or value is None else float(value)
        found.setdefault(str(name), []).append((int(step), number))
    return found
