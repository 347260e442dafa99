"""Matching: the merged tensors of two runs side by side, whatever their layouts and micro-batch sizes.

Comes after `merge` and before `judge`. Tensors are matched by step, samples, phase, kind, name, io and path. Where one
run's tensor holds more samples than the other's (another micro-batch size, tokens of all data-parallel ranks at an
expert), the smaller ones are added up to the least common number of samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import numpy.typing as npt

from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.merge import labelled_query, merge_query, micro_batch_size
from msprobe_megatron.analyse.sketches import count, distances

if TYPE_CHECKING:
    from msprobe_megatron.analyse.tensor_pairs import TensorPairs

COMPARED = (
    *("activation", "gradient", "parameter", "grad_reduced", "grad_clipped"),
    *("optimizer_state", "update", "data", "loss"),
)
STATISTICS = ("numel", "min", "max", "sum", "sumsq", "absmax", "n_nan", "n_posinf", "n_neginf", "n_zero")
_SPREADS = ("d_sum", "d_norm", "d_extreme", "d_counts")

Column = npt.NDArray[Any]


@dataclass
class Pairs:
    """Columns of equal length, one entry a matched or unmatched tensor; `_l` is the golden run, `_r` the other.

    Example::

        pairs = match(open_run("golden"), open_run("other"), step=0)
        pairs["name"][0], pairs["sumsq_l"][0], pairs["sumsq_r"][0]
    """

    columns: dict[str, Column]
    same_cuts: bool = False
    """Whether both runs cut their tensors alike, so that parts can be compared too."""
    tensors: TensorPairs | None = None
    """Exact figures of those pairs that both runs have saved as tensors; see `tensor_pairs`."""

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def keys(self) -> list[tuple[Any, ...]]:
        """What identifies each entry, for joins with another pair of runs."""
        names = ("step", "block", "phase", "kind", "name", "io", "path")
        return list(zip(*(self.columns[name].tolist() for name in names), strict=True))


def match(golden: Run, run: Run, step: int | None = None) -> Pairs:
    """All tensors of both runs, matched; of one step, or of the steps that both have."""
    connection = duckdb.connect()
    alike = same_layout(golden, run)
    steps = sorted(set(golden.steps) & set(run.steps)) if step is None else [step]
    for prefix, side in (("l", golden), ("r", run)):
        query = merge_query(connection, side, step, prefix, kinds=COMPARED, by_rank=alike)
        chosen = ", ".join(map(str, steps)) or "-1"
        connection.execute(
            f"create temp table {prefix} as select * from ({query}) where kind <> 'loss' and step in ({chosen})"  # noqa: S608
        )
        connection.execute(_loss_rows(prefix, chosen, side, micro_batch_size(side, connection.table(f"{prefix}_rows"))))
    _join_recomputed(connection)
    connection.execute(_UNITS)
    for prefix in ("l", "r"):
        connection.execute(_BLOCKS.replace("{side}", prefix))
    pairs = Pairs(_plain(connection.query(_PAIRS).fetchnumpy()), same_cuts(golden, run))
    pairs.columns["distance"] = _distances(connection, golden, run, step, pairs)
    return pairs


def _distances(
    connection: duckdb.DuckDBPyConnection, golden: Run, run: Run, step: int | None, pairs: Pairs
) -> npt.NDArray[np.float64]:
    """Norms of the differences, where both runs have sketches."""
    rows = [count(side.rows(connection, step)) for side in (golden, run)]
    if not min(rows):
        return np.full(len(pairs), np.nan)
    labelled = [labelled_query(connection, side, step, f"sketched_{i}") for i, side in enumerate((golden, run))]
    keys = (pairs["sketch_key_l"], pairs["sketch_key_r"])
    found = distances(connection, (labelled[0], labelled[1]), keys, max(rows))
    # Elements are numbered in the order of the dimensions: [s, b, h] and [b, s, h] are numbered differently.
    return np.where(pairs["dims_l"] == pairs["dims_r"], found, np.nan)


def same_layout(golden: Run, run: Run) -> bool:
    """Whether both runs spread the model over the same ranks in the same way."""
    alike = all(golden.facts.get(key) == run.facts.get(key) for key in ("sizes", "world", "sequence_parallel"))
    sizes = [side.facts.get("arguments", {}).get("micro_batch_size") for side in (golden, run)]
    return alike and sizes[0] == sizes[1]


def same_cuts(golden: Run, run: Run) -> bool:
    """Whether both runs cut a tensor of one microbatch in the same way, however many stages and replicas they have."""
    cuts = [{axis: side.sizes.get(axis, 1) for axis in ("tp", "cp", "ep", "etp")} for side in (golden, run)]
    others = [
        (side.facts.get("sequence_parallel"), side.facts.get("arguments", {}).get("micro_batch_size"))
        for side in (golden, run)
    ]
    return cuts[0] == cuts[1] and others[0] == others[1]


def _loss_rows(prefix: str, steps: str, run: Run, micro_batch: int) -> str:
    """The mean loss of a step. Megatron's loss functions report a sum and a count, or a mean, for each microbatch.

    Some have already added them up over data-parallel ranks and some have not; the quotient of all sums and all
    counts is the same in both cases. It needs all microbatches.
    """
    whole = int(run.facts.get("arguments", {}).get("global_batch_size") or 0)
    return f"""
    insert into {prefix} by name
    select step, 0 as samples_from, 0 as samples, 'forward' as phase, 'loss' as kind, name, 'output' as io,
        'mean' as path, 'fixed' as tokens, any_value(op) as op, any_value(dtype) as dtype, 1 as numel,
        loss as min, loss as max, loss as sum, loss * loss as sumsq, abs(loss) as absmax,
        any_value(bad) as n_nan, any_value(bad) as bad, 0 as n_posinf, 0 as n_neginf, 0 as n_zero,
        0 as d_sum, 0 as d_norm, 0 as d_extreme, 0 as d_counts, false as d_digest, 1 as copies,
        min(rank) as rank, max(seq) as seq, 1 as parts, '' as dims, 0 as quantum,
        case when any_value(covered) < {whole}
            then 'only ' || any_value(covered) || ' of {whole} samples were recorded' else '' end as reason
    from (
        select step, name, op, dtype, rank, seq,
            sum(case when path in ('', '0') then sum end) over (partition by step, name)
                / coalesce(sum(case when path = '1' then sum end) over (partition by step, name),
                           count(*) over (partition by step, name)) as loss,
            sum(n_nan + n_posinf + n_neginf) over (partition by step, name) as bad,
            {micro_batch} * count(distinct (microbatch, dp)) over (partition by step, name) as covered
        from {prefix}_rows where kind = 'loss' and io = 'output' and path in ('', '0', '1') and step in ({steps})
    ) group by step, name, loss
    """  # noqa: S608


def _join_recomputed(connection: duckdb.DuckDBPyConnection) -> None:
    """A repeated forward that the other run does not repeat must give what the other's forward gave."""
    for side, other in (("l", "r"), ("r", "l")):
        connection.execute(f"alter table {side} add column join_phase varchar")
        connection.execute(f"update {side} set join_phase = phase")  # noqa: S608
        connection.execute(
            f"""update {side} set join_phase = 'forward' where phase = 'recompute' and (kind, name, io, path) not in
            (select distinct (kind, name, io, path) from {other} where phase = 'recompute')"""  # noqa: S608
        )


_UNITS = """
create temp table units as
select kind, name, io, path, case when a = 0 or b = 0 then 1 else lcm(a, b) end as unit from (
    select kind, name, io, path, coalesce(max(s) filter (side = 'l'), max(s)) as a,
        coalesce(max(s) filter (side = 'r'), max(s)) as b
    from (select 'l' as side, kind, name, io, path, max(samples) as s from l group by kind, name, io, path
          union all
          select 'r' as side, kind, name, io, path, max(samples) as s from r group by kind, name, io, path)
    group by kind, name, io, path)
"""

# Tensors that hold no samples (masks, rotary tables) are the same in every microbatch: the first one stands for all.
# Numbers of tokens an expert add up element by element, which only their sum survives.
_ADDED = ("numel", "sum", "sumsq", "n_nan", "n_posinf", "n_neginf", "n_zero", "bad")
_COUNTS = {"numel": "1", "sum": "sum(sum)", "sumsq": "sum(sum) * sum(sum)", "n_zero": "0"}
_COUNTS.update(dict.fromkeys(("n_nan", "n_posinf", "n_neginf", "bad"), "0"))
_BLOCKS = (
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
    any_value(dims) as dims, max(quantum) as quantum,
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
_BOTH = (
    *(*STATISTICS, *_SPREADS, "bad", "dtype", "global_shape"),
    *("digest", "d_digest", "copies", "reason", "seq", "rank", "parts", "part_high", "part_low", "sketch_key"),
    *("dims", "quantum"),
)
_PAIRS = f"""
select coalesce(a.step, b.step) as step, coalesce(a.block, b.block) as block,
    case when a.phase = 'recompute' or b.phase = 'recompute' then 'recompute' else coalesce(a.phase, b.phase) end
        as phase,
    coalesce(a.kind, b.kind) as kind, coalesce(a.name, b.name) as name, coalesce(a.io, b.io) as io,
    coalesce(a.path, b.path) as path, coalesce(a.op, b.op) as op, coalesce(a.tokens, b.tokens) as tokens,
    coalesce(a.microbatch, b.microbatch) as microbatch, coalesce(a.unit, b.unit) as unit,
    a.step is not null as left_has, b.step is not null as right_has,
    {", ".join(f"a.{name} as {name}_l, b.{name} as {name}_r" for name in _BOTH)}
from l_blocks a full outer join r_blocks b
    on a.step = b.step and a.join_phase = b.join_phase and a.kind = b.kind and a.name = b.name and a.io = b.io
    and a.path = b.path and a.block = b.block
"""  # noqa: S608


def _plain(columns: dict[str, Any]) -> dict[str, Column]:
    """Masked columns become NaN or None: what is absent compares as different from everything."""
    plain: dict[str, Column] = {}
    for name, column in columns.items():
        if not isinstance(column, np.ma.MaskedArray):
            plain[name] = np.asarray(column)
            continue
        absent = np.ma.getmaskarray(column)
        words = column.dtype == object or name.startswith(("digest", "sketch_key"))
        values: Column = np.asarray(column.data).astype(object if words else np.float64)
        values[absent] = None if words else np.nan
        plain[name] = values
    return plain
