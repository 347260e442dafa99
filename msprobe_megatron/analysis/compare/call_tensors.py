"""Tensors of API calls as one run has them: shapes, and where its ranks and microbatches hold equal values.

Read by `call_layouts`, which derives their layouts; SQL over the rows of all ranks, one entry per tensor of a call.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import duckdb
import pyarrow as pa

from msprobe_megatron.analysis.load.run import Run

Key = tuple[str, str, str, str]
"""kind, name, io and path of a tensor."""
RECORDED = "?API call"
"""Shard spec that rows of API calls carry."""
COORDINATES = ("tp", "cp", "dp", "pp")
_CLOSE = 4 * 2.0**-23
"""Statistics of ranks further apart than this (relative) are unequal; replicas are equal, mostly to the last bit."""


@dataclass
class CallTensor:
    """One tensor of a call on one side: all its ranks, microbatches and steps together."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    shapes: int
    """Number of different shapes."""
    ragged: bool
    """At most the first dimension varies."""
    repeated: bool
    """A rank has it several times in one microbatch."""
    varies: bool
    """Microbatches or data-parallel ranks hold different values."""
    total: float
    squares: float
    numel: float
    unequal: set[str] = field(default_factory=set)
    """Axes along which some ranks differ."""
    equal: set[str] = field(default_factory=set)
    """Axes along which some ranks are equal and not zero."""


@dataclass
class Side:
    """The calls of one run."""

    run: Run
    tensors: dict[Key, CallTensor]
    calls: dict[tuple[str, str], tuple[int, int]]
    """Smallest and largest number of calls of a function in one pass of a module."""

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return self.run.sizes.get(axis, 1)


def function_of(name: str) -> tuple[str, str]:
    """Module and function of a call."""
    module, _, call = name.partition("/")
    return module, call.rpartition(".")[0]


def has_calls(connection: duckdb.DuckDBPyConnection, side: str) -> bool:
    """True if there are rows of API calls among those registered as `recorded_{side}`."""
    query = f"select 1 from recorded_{side} where shard = '{RECORDED}' limit 1"  # noqa: S608
    return bool(connection.execute(query).fetchall())


def read_calls(connection: duckdb.DuckDBPyConnection, side: str, run: Run) -> Side:
    """All tensors of calls among the rows that are registered as `recorded_{side}`."""
    connection.execute(_SQL_CALLS.format(side=side, recorded=RECORDED))
    tensors = {
        (kind, name, io, path): CallTensor(op or "", dtype or "", tuple(shape or ()), *rest)
        for kind, name, io, path, op, dtype, shape, *rest in connection.execute(
            _SQL_TENSORS.format(side=side)
        ).fetchall()
    }
    for axis in COORDINATES:
        if run.sizes.get(axis, 1) > 1:
            others = ", ".join(other for other in COORDINATES if other != axis)
            spreads = connection.execute(_SQL_SPREADS.format(side=side, others=others, close=_CLOSE))
            for kind, name, io, path, unequal, equal in spreads.fetchall():
                tensor = tensors[kind, name, io, path]
                tensor.unequal.update([axis] if unequal else [])
                tensor.equal.update([axis] if equal else [])
    counts: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for name, rank in connection.execute(_SQL_COUNTS.format(side=side)).fetchall():
        counts[function_of(name)][rank] += 1
    return Side(run, tensors, {key: (min(n.values()), max(n.values())) for key, n in counts.items()})


def with_specs(connection: duckdb.DuckDBPyConnection, side: str, specs: dict[Key, str]) -> duckdb.DuckDBPyRelation:
    """The rows registered as `recorded_{side}`, those of calls with these shard specs."""
    columns = list(zip(*(key for key in specs), strict=True)) or [()] * 4
    names = ("kind", "name", "io", "path")
    table = pa.table(
        {
            **{name: pa.array(column, pa.string()) for name, column in zip(names, columns, strict=True)},
            "derived": pa.array(list(specs.values()), pa.string()),
        }
    )
    connection.register(f"derived_{side}", table)
    return connection.query(_SQL_REPLACED.format(side=side, recorded=RECORDED))


_SQL_CALLS = """
create or replace temp table calls_{side} as
select kind, name, io, path, op, dtype, shape, step, microbatch, phase, rank, tp, cp, dp, pp, numel, sum, sumsq, absmax,
    min, max, coalesce(n_nan, 0) + coalesce(n_posinf, 0) + coalesce(n_neginf, 0) as bad
from recorded_{side} where shard = '{recorded}' and kind in ('activation', 'gradient')
"""

_SQL_TENSORS = """
with once as (
    select kind, name, io, path, max(copies) > 1 as repeated from (
        select kind, name, io, path, count(*) as copies from calls_{side}
        group by kind, name, io, path, step, microbatch, phase, rank) group by kind, name, io, path
), over_time as (
    select kind, name, io, path, bool_or(various) as varies from (
        select kind, name, io, path, count(distinct (sum, sumsq, absmax, min, max, bad, shape)) > 1 as various
        from calls_{side} group by kind, name, io, path, step, phase, tp, cp, pp) group by kind, name, io, path
)
select kind, name, io, path, any_value(op), any_value(dtype), any_value(shape), count(distinct shape),
    count(distinct shape[2:]) = 1, any_value(repeated), any_value(varies), coalesce(sum(sum), 0),
    coalesce(sum(sumsq), 0), sum(numel)
from calls_{side} join once using (kind, name, io, path) join over_time using (kind, name, io, path)
group by kind, name, io, path
"""

_SQL_SPREADS = """
select kind, name, io, path, bool_or(spread), bool_or(not spread and largest > 0) from (
    select kind, name, io, path, coalesce(max(absmax), 0) as largest, count(*) > 1
        and coalesce(sqrt(max(sumsq)) - sqrt(min(sumsq)) > {close} * sqrt(max(sumsq))
            or max(sum) - min(sum) > {close} * sqrt(max(numel) * max(sumsq))
            or max(absmax) - min(absmax) > {close} * max(absmax)
            or max(min) - min(min) > {close} * max(absmax) or max(max) - min(max) > {close} * max(absmax)
            or min(bad) <> max(bad) or min(shape) <> max(shape), false) as spread
    from calls_{side} group by kind, name, io, path, step, microbatch, phase, {others} having count(*) > 1
) group by kind, name, io, path
"""

_SQL_COUNTS = "select distinct name, rank from calls_{side}"

# Digests number the elements of a part, not those of the whole.
_SQL_REPLACED = """
select rows.* replace (
    case when rows.shard = '{recorded}' then coalesce(derived, rows.shard) else rows.shard end as shard,
    case when rows.shard = '{recorded}' then null else digest end as digest)
from recorded_{side} as rows left join derived_{side} as found
    on rows.kind = found.kind and rows.name = found.name and rows.io = found.io and rows.path = found.path
"""
