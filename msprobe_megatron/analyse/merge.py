"""Merging shards: from the rows of all ranks to the tensors that a run on one card would have seen.

Rows say by their shard spec which axes cut them. Parts add up (sums and counts add, minima and maxima combine);
ranks that hold the same part are replicas, of which the first is taken and the others must agree. Works as one
query, so that 1,000 ranks need no more Python than two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from msprobe_megatron.analyse.load import Run
from msprobe_megatron.topology.shards import ShardSpec

KEY = ("step", "microbatch", "dp_samples", "phase", "kind", "name", "io", "path")
_AXES = ("tp", "pp", "dp", "cp", "ep", "etp")


@dataclass(frozen=True)
class _Layout:
    """What a shard text means for merging."""

    cut: frozenset[str]
    samples: bool
    parts: int
    flat: str
    reason: str


def merged(run: Run, step: int | None = None) -> duckdb.DuckDBPyRelation:
    """One row a whole tensor: the key columns, statistics, `parts`, `expected_parts`, `replicas_agree`, `reason`.

    Activation gradients are divided by the run's gradient scale and by the loss scale, so that layouts can be
    compared. `reason` is empty where the merge is whole and otherwise says why it is not.

    Example::

        merged(open_run("probe_out")).filter("reason = ''").limit(5).show()
    """
    connection = duckdb.connect()
    rows = run.rows(connection, step)
    connection.register("rows_view", rows)
    texts = [text or "" for (text,) in rows.project("shard").distinct().fetchall()]
    connection.register("layouts", _layout_table(texts, run.sizes))
    scale = float(run.facts.get("gradient_scale") or 1.0)
    return connection.query(
        _QUERY.replace("{key}", ", ".join(KEY)).replace("{scale}", repr(scale)).replace("{part}", _PART)
    )


def _layout_table(texts: list[str], sizes: dict[str, int]) -> pa.Table:
    """One row a shard text: few of them, however many rows a run has."""
    layouts = [_layout(text, sizes) for text in texts]
    columns: dict[str, list[Any]] = {"shard": texts}
    for axis in _AXES:
        columns[f"cut_{axis}"] = [axis in layout.cut for layout in layouts]
    for name in ("samples", "parts", "flat", "reason"):
        columns[name] = [getattr(layout, name) for layout in layouts]
    return pa.table(columns)


def _layout(text: str, sizes: dict[str, int]) -> _Layout:
    spec = ShardSpec.parse(text)
    if spec.unknown is not None:
        return _Layout(frozenset(_AXES), False, 0, "", spec.unknown)
    cuts = [cut for dim in spec.dims for cut in dim.cuts]
    axes = frozenset(cut.axis for cut in cuts if cut.order != "samples")
    parts = 1
    for axis in axes:
        parts *= sizes.get(axis, 1)
    if spec.partial:
        return _Layout(axes | set(spec.partial), False, 0, "", f"partial over {', '.join(spec.partial)}")
    flat = f"{spec.flat[0]}:{spec.flat[1]}" if spec.flat is not None else ""
    return _Layout(axes, any(cut.order == "samples" for cut in cuts), parts if not flat else 0, flat, "")


_PART = " || ',' || ".join(f"case when cut_{axis} then cast({axis} as varchar) else '' end" for axis in _AXES)

_QUERY = """
with scales as (
    select step as scale_step, max(max) as loss_scale from rows_view
    where kind = 'loss' and name = 'loss_scale' group by step
), labelled as (
    select rows_view.*, layouts.* exclude (shard),
        case when samples then dp else -1 end as dp_samples,
        {part} || '|' || flat as part,
        case kind when 'gradient' then {scale} * coalesce(loss_scale, 1)
                  when 'grad_reduced' then coalesce(loss_scale, 1) else 1 end as factor
    from rows_view join layouts using (shard) left join scales on scale_step = step
), replicas as (
    select {key}, part,
        arg_min(numel, rank) as numel, arg_min(min, rank) as min, arg_min(max, rank) as max,
        arg_min(sum, rank) as sum, arg_min(sumsq, rank) as sumsq, arg_min(absmax, rank) as absmax,
        arg_min(n_nan, rank) as n_nan, arg_min(n_posinf, rank) as n_posinf,
        arg_min(n_neginf, rank) as n_neginf, arg_min(n_zero, rank) as n_zero,
        count(distinct (min, max, sum, sumsq, n_nan, n_posinf, n_neginf, n_zero)) = 1 as agree,
        min(rank) as rank, min(seq) as seq, any_value(op) as op, any_value(dtype) as dtype,
        any_value(factor) as factor, any_value(parts) as expected, any_value(reason) as reason,
        any_value(global_shape) as global_shape
    from labelled group by {key}, part
)
select {key}, any_value(op) as op, any_value(dtype) as dtype, any_value(global_shape) as global_shape,
    sum(numel) as numel, min(min) / any_value(factor) as min, max(max) / any_value(factor) as max,
    sum(sum) / any_value(factor) as sum, sum(sumsq) / (any_value(factor) * any_value(factor)) as sumsq,
    max(absmax) / any_value(factor) as absmax,
    sum(n_nan) as n_nan, sum(n_posinf) as n_posinf, sum(n_neginf) as n_neginf, sum(n_zero) as n_zero,
    count(*) as parts, any_value(expected) as expected_parts, bool_and(agree) as replicas_agree,
    min(rank) as rank, min(seq) as seq,
    case when any_value(reason) <> '' then any_value(reason)
         when any_value(expected) > 0 and count(*) <> any_value(expected)
            then count(*) || ' of ' || any_value(expected) || ' parts' else '' end as reason
from replicas group by {key}
"""
