"""Matching: the merged tensors of two runs side by side, whatever their layouts and micro-batch sizes.

Follows `merge` and precedes `judge`. Tensors are matched by step, samples, phase, kind, name, io and path. Where one
run's tensor holds more samples than the other's (another micro-batch size, tokens of all data-parallel ranks at an
expert), the smaller ones are added up to the least common multiple of the numbers of samples.

Where both runs recorded sketches, the norm of the element-wise difference is estimated too. A sketch is linear in the
tensor and keyed by the index of each element in the whole tensor: sketches of shards add up, and the norm of the
difference of two sketches estimates the norm of the difference of the tensors. A permutation, swapped halves or shifted
positions are visible there and in no statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import duckdb
import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.call_layouts import derived_rows
from msprobe_megatron.analysis.compare.merge import labelled_query, merge_query, micro_batch_size
from msprobe_megatron.analysis.load.run import Run

if TYPE_CHECKING:
    from msprobe_megatron.analysis.compare.pairs.tensor_pairs import TensorPairs

COMPARED = (
    "activation",
    "gradient",
    "parameter",
    "buffer",
    "grad_reduced",
    "grad_clipped",
    "optimizer_state",
    "update",
    "data",
    "loss",
)
STATISTICS = ("numel", "min", "max", "sum", "sumsq", "absmax", "n_nan", "n_posinf", "n_neginf", "n_zero")
_SPREADS = ("d_sum", "d_norm", "d_extreme", "d_counts")
_ROWS_AT_ONCE = 200_000

T = TypeVar("T")
U = TypeVar("U")
Column = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pair(Generic[T]):
    """The same thing of both runs: `left` of the golden run, `right` of the other.

    Example::

        >>> Pair(2.0, 3.0).map(lambda x: x * x)
        Pair(left=4.0, right=9.0)
        >>> left, right = Pair("golden", "run")
        >>> right
        'run'
    """

    left: T
    right: T

    def map(self, function: Callable[[T], U]) -> Pair[U]:
        """The function of both sides."""
        return Pair(function(self.left), function(self.right))

    def __iter__(self) -> Iterator[T]:
        yield self.left
        yield self.right


@dataclass
class Pairs:
    """Columns of equal length, one entry per matched or unmatched tensor.

    Columns that both runs have end in `_l` (golden) and `_r`; `both` returns the two.
    """

    columns: dict[str, Column]
    same_cuts: bool = False
    """True if both runs split their tensors alike, so that parts can be compared too."""
    tensors: TensorPairs | None = None
    """Element-wise results of the pairs that both runs saved as tensors; see `tensor_pairs`."""

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def both(self, name: str) -> Pair[Column]:
        """A column that both runs have."""
        return Pair(self.columns[f"{name}_l"], self.columns[f"{name}_r"])

    def in_both(self) -> npt.NDArray[np.bool_]:
        """Entries that both runs recorded."""
        both: npt.NDArray[np.bool_] = self["left_has"].astype(bool) & self["right_has"].astype(bool)
        return both

    def by_sum(self) -> npt.NDArray[np.bool_]:
        """Entries of which one run holds summands on its ranks, so that only the sum can be compared."""
        summands: npt.NDArray[np.bool_] = np.maximum(*self.both("by_sum").map(_number)) > 0
        return summands

    def keys(self) -> list[tuple[Any, ...]]:
        """Identity of each entry, for joins with another pair of runs."""
        names = ("step", "block", "phase", "kind", "name", "io", "path")
        return list(zip(*(self.columns[name].tolist() for name in names), strict=True))


def match(golden: Run, run: Run, step: int | None = None) -> Pairs:
    """All tensors of both runs, matched; of one step, or of the steps that both have."""
    connection = duckdb.connect()
    alike = same_layout(golden, run)
    steps = sorted(set(golden.steps) & set(run.steps)) if step is None else [step]
    chosen = ", ".join(map(str, steps)) or "-1"
    rows = golden.rows(connection, step), run.rows(connection, step)
    if not alike and _micro_batch_argument(golden) == _micro_batch_argument(run):
        rows = derived_rows(connection, golden, run, rows)
    for side, of, other, own in (("l", golden, run, rows[0]), ("r", run, golden, rows[1])):
        merged = merge_query(connection, of, step, side, kinds=COMPARED, by_rank=alike, rows=own, beside=other.sizes)
        connection.execute(_SQL_SIDE.format(side=side, merged=merged, steps=chosen))
        samples = int(of.facts.get("arguments", {}).get("global_batch_size") or 0)
        micro_batch = micro_batch_size(of, connection.table(f"{side}_rows"))
        connection.execute(_SQL_LOSS.format(side=side, steps=chosen, samples=samples, micro_batch=micro_batch))
    for side, opposite in (("l", "r"), ("r", "l")):
        connection.execute(_SQL_JOIN_PHASE.format(side=side, other=opposite))
    connection.execute(_SQL_UNITS)
    for side in ("l", "r"):
        connection.execute(_SQL_BLOCKS.format(side=side))
    pairs = Pairs(_plain(connection.query(_SQL_PAIRS).fetchnumpy()), same_cuts(golden, run))
    pairs.columns["distance"] = _distances(connection, Pair(golden, run), step, pairs)
    return pairs


def same_layout(golden: Run, run: Run) -> bool:
    """True if both runs distribute the model over the same ranks in the same way."""
    alike = all(golden.facts.get(key) == run.facts.get(key) for key in ("sizes", "world", "sequence_parallel"))
    return alike and _micro_batch_argument(golden) == _micro_batch_argument(run)


def same_cuts(golden: Run, run: Run) -> bool:
    """True if both runs split a tensor of one microbatch alike, however many stages and replicas they have."""

    def cuts(of: Run) -> tuple[Any, ...]:
        sizes = [of.sizes.get(axis, 1) for axis in ("tp", "cp", "ep", "etp")]
        return (*sizes, of.facts.get("sequence_parallel"), _micro_batch_argument(of))

    return cuts(golden) == cuts(run)


def _micro_batch_argument(run: Run) -> Any:
    return run.facts.get("arguments", {}).get("micro_batch_size")


# One run's merged tensors; the loss is added by `_SQL_LOSS`.
_SQL_SIDE = """
create temp table {side} as select * from ({merged}) where (kind <> 'loss' or name = 'grad_norm') and step in ({steps})
"""

# The mean loss of a step. Megatron's loss functions report a sum and a count, or a mean, for each microbatch. Some have
# already added them up over data-parallel ranks and some have not; the quotient of all sums and all counts is the same
# in both cases. It needs all microbatches.
_SQL_LOSS = """
insert into {side} by name
select step, 0 as samples_from, 0 as samples, 'forward' as phase, 'loss' as kind, name, 'output' as io,
    'mean' as path, 'fixed' as tokens, any_value(op) as op, any_value(dtype) as dtype, 1 as numel,
    loss as min, loss as max, loss as sum, loss * loss as sumsq, abs(loss) as absmax,
    any_value(bad) as n_nan, any_value(bad) as bad, 0 as n_posinf, 0 as n_neginf, 0 as n_zero,
    0 as d_sum, 0 as d_norm, 0 as d_extreme, 0 as d_counts, false as d_digest, 1 as copies,
    min(rank) as rank, max(seq) as seq, 1 as parts, '' as dims, 0 as by_sum, 0 as quantum,
    case when any_value(covered) < {samples}
        then 'only ' || any_value(covered) || ' of {samples} samples were recorded' else '' end as reason
from (
    select step, name, op, dtype, rank, seq,
        sum(case when path in ('', '0') then sum end) over (partition by step, name)
            / coalesce(sum(case when path = '1' then sum end) over (partition by step, name),
                       count(*) over (partition by step, name)) as loss,
        sum(n_nan + n_posinf + n_neginf) over (partition by step, name) as bad,
        {micro_batch} * count(distinct (microbatch, dp)) over (partition by step, name) as covered
    from {side}_rows where kind = 'loss' and io = 'output' and path in ('', '0', '1') and step in ({steps})
) group by step, name, loss
"""

# A recomputed forward that the other run does not recompute must equal the other run's forward.
_SQL_JOIN_PHASE = """
alter table {side} add column join_phase varchar;
update {side} set join_phase = phase;
update {side} set join_phase = 'forward' where phase = 'recompute' and (kind, name, io, path) not in
    (select distinct (kind, name, io, path) from {other} where phase = 'recompute')
"""

# Samples per entry: the least common multiple of those of both sides.
_SQL_UNITS = """
create temp table units as
select kind, name, io, path, case when a = 0 or b = 0 then 1 else lcm(a, b) end as unit from (
    select kind, name, io, path, coalesce(max(s) filter (side = 'l'), max(s)) as a,
        coalesce(max(s) filter (side = 'r'), max(s)) as b
    from (select 'l' as side, kind, name, io, path, max(samples) as s from l group by kind, name, io, path
          union all
          select 'r' as side, kind, name, io, path, max(samples) as s from r group by kind, name, io, path)
    group by kind, name, io, path)
"""

# Tensors that hold no samples (masks, rotary tables) are the same in every microbatch: the first one is used. Numbers
# of tokens per expert add up element by element; of their statistics only the sum remains meaningful.
_ADDED = ("numel", "sum", "sumsq", "n_nan", "n_posinf", "n_neginf", "n_zero", "bad")
_COUNTS = {"numel": "1", "sum": "sum(sum)", "sumsq": "sum(sum) * sum(sum)", "n_zero": "0"}
_COUNTS.update(dict.fromkeys(("n_nan", "n_posinf", "n_neginf", "bad"), "0"))
_SQL_BLOCKS = (
    """
create temp table {side}_blocks as
select step, phase, join_phase, kind, name, io, path, samples_from // unit as block, any_value(tokens) as tokens,
    min(microbatch) as microbatch, max(microbatch) as last_microbatch, any_value(op) as op,
    any_value(dtype) as dtype, any_value(global_shape) as global_shape, any_value(unit) as unit,
"""
    + "\n".join(
        f"    case any_value(tokens) when 'fixed' then arg_min({name}, samples_from)"
        f" when 'counts' then {_COUNTS.get(name, 'null')} else sum({name}) end as {name},"
        for name in _ADDED
    )
    + """
    case when any_value(tokens) = 'counts' then sum(sum) else min(min) end as min,
    case when any_value(tokens) = 'counts' then sum(sum) else max(max) end as max,
    case when any_value(tokens) = 'counts' then sum(sum) else max(absmax) end as absmax,
    max(d_sum) as d_sum, max(d_norm) as d_norm, max(d_extreme) as d_extreme, max(d_counts) as d_counts,
    bool_or(d_digest) as d_digest, case when count(*) = 1 then any_value(digest) end as digest,
    max(copies) as copies, min(rank) as rank, min(seq) as seq, max(parts) as parts,
    any_value(dims) as dims, max(by_sum) as by_sum, max(quantum) as quantum,
    max(part_high) as part_high, min(part_low) as part_low,
    case when count(*) = 1 then hash(hash(phase, kind, name, io, path), step, any_value(samples_from)) end
        as sketch_key,
    case when max(reason) <> '' then max(reason)
         when sum(samples) > 0 and sum(samples) < any_value(unit)
            then 'only ' || cast(sum(samples) as bigint) || ' of ' || any_value(unit) || ' samples were recorded'
         else '' end as reason
from {side} join units using (kind, name, io, path)
group by step, phase, join_phase, kind, name, io, path, samples_from // unit
"""
)
_BOTH_SIDES = (
    *STATISTICS,
    *_SPREADS,
    "bad",
    "dtype",
    "global_shape",
    "digest",
    "d_digest",
    "copies",
    "reason",
    "seq",
    "rank",
    "parts",
    "part_high",
    "part_low",
    "sketch_key",
    "dims",
    "by_sum",
    "quantum",
)
_SQL_PAIRS = f"""
select coalesce(a.step, b.step) as step, coalesce(a.block, b.block) as block,
    case when a.phase = 'recompute' or b.phase = 'recompute' then 'recompute' else coalesce(a.phase, b.phase) end
        as phase,
    coalesce(a.kind, b.kind) as kind, coalesce(a.name, b.name) as name, coalesce(a.io, b.io) as io,
    coalesce(a.path, b.path) as path, coalesce(a.op, b.op) as op, coalesce(a.tokens, b.tokens) as tokens,
    coalesce(a.microbatch, b.microbatch) as microbatch, coalesce(a.unit, b.unit) as unit,
    a.step is not null as left_has, b.step is not null as right_has,
    {", ".join(f"a.{name} as {name}_l, b.{name} as {name}_r" for name in _BOTH_SIDES)}
from l_blocks a full outer join r_blocks b
    on a.step = b.step and a.join_phase = b.join_phase and a.kind = b.kind and a.name = b.name and a.io = b.io
    and a.path = b.path and a.block = b.block
"""  # noqa: S608


def _plain(columns: dict[str, Any]) -> dict[str, Column]:
    """Masked entries become NaN or None: a missing value compares as different from everything."""
    plain: dict[str, Column] = {}
    for name, column in columns.items():
        if not isinstance(column, np.ma.MaskedArray):
            plain[name] = np.asarray(column)
            continue
        missing = np.ma.getmaskarray(column)
        objects = column.dtype == object or name.startswith(("digest", "sketch_key"))
        values: Column = np.asarray(column.data).astype(object if objects else np.float64)
        values[missing] = None if objects else np.nan
        plain[name] = values
    return plain


def _number(column: Column) -> Floats:
    return np.nan_to_num(column.astype(np.float64))


# One sketch per part of a whole tensor: that of the lowest rank among its replicas.
_SQL_SKETCHES = """
select hash(hash(phase, kind, name, io, path), step, samples_from) as whole, sketch, factor
from (select *, row_number() over (partition by phase, kind, name, io, path, step, samples_from, part order by rank)
        as replica
    from ({labelled}) where sketch is not null and tokens <> 'experts' and shard not like '%:unordered%')
where replica = 1 and hash(name) % {slices} = {slice} order by whole
"""


def _distances(connection: duckdb.DuckDBPyConnection, runs: Pair[Run], step: int | None, pairs: Pairs) -> Floats:
    """Norm of the difference of every pair, estimated from sketches; NaN where one side has none.

    Large runs are read in slices of names, so that memory stays bounded.
    """
    counts = runs.map(lambda run: int(run.rows(connection, step).aggregate("count(sketch)").fetchall()[0][0]))
    found = np.full(len(pairs), np.nan)
    if not counts.left or not counts.right:
        return found
    labelled = Pair(
        labelled_query(connection, runs.left, step, "sketched_l"),
        labelled_query(connection, runs.right, step, "sketched_r"),
    )
    slices = max(counts) // _ROWS_AT_ONCE + 1
    for number in range(slices):
        left, right = (_whole_sketches(connection, query, slices, number) for query in labelled)
        if left is None or right is None or left[1].shape[1] != right[1].shape[1]:
            continue
        keys = pairs.both("sketch_key")
        at = Pair(_find(left[0], keys.left), _find(right[0], keys.right))
        both = np.flatnonzero((at.left >= 0) & (at.right >= 0))
        found[both] = np.linalg.norm(left[1][at.left[both]] - right[1][at.right[both]], axis=1)
    # Elements are numbered in the order of the dimensions: [s, b, h] and [b, s, h] are numbered differently.
    dims = pairs.both("dims")
    return np.where(dims.left == dims.right, found, np.nan)


def _whole_sketches(
    connection: duckdb.DuckDBPyConnection, labelled: str, slices: int, number: int
) -> tuple[npt.NDArray[np.uint64], Floats] | None:
    """Keys and sketches of the whole tensors of one slice of names, sorted by key; None where there are none."""
    query = _SQL_SKETCHES.format(labelled=labelled, slices=slices, slice=number)
    table = connection.query(query).to_arrow_table().combine_chunks()
    if not len(table):
        return None
    keys = table.column("whole").to_numpy()
    lists = table.column("sketch").combine_chunks()
    values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    cells = len(values) // len(keys)
    if cells * len(keys) != len(values):
        return None
    parts = values.reshape(len(keys), cells) / table.column("factor").to_numpy()[:, None]
    whole, first = np.unique(keys, return_index=True)
    return whole, np.add.reduceat(parts, first, axis=0)


def _find(sorted_keys: npt.NDArray[np.uint64], wanted: Any) -> npt.NDArray[np.int64]:
    """Index of every wanted key, -1 where it is missing."""
    known = np.array([key is not None for key in wanted])
    keys = np.array([key if key is not None else 0 for key in wanted], np.uint64)
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(known & (sorted_keys[at] == keys), at, -1)
