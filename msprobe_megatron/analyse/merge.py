"""Merging shards: from the rows of all ranks to the tensors that a run on one card would have seen.

Rows say by their shard spec which axes cut them. Parts add up (sums and counts add, minima and maxima combine);
ranks that hold the same part are replicas, of which the first is taken and the others must agree. Works as one
query, so that 1,000 ranks need no more Python than two.

Every merged tensor carries the samples of the global batch that it was computed from. Megatron deals them out by
microbatch, then data-parallel rank: microbatch m of rank d of a run with micro-batch size b holds the samples from
(m * dp + d) * b. Tokens that were sent to experts come from all data-parallel ranks at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from msprobe_megatron.analyse.load import Run
from msprobe_megatron.topology.shards import ShardSpec

KEY = ("step", "microbatch", "samples_from", "samples", "phase", "kind", "name", "io", "path")
_AXES = ("tp", "pp", "dp", "cp", "ep", "etp", "edp")


@dataclass(frozen=True)
class Layout:
    """What a shard text means for merging."""

    cut: frozenset[str]
    tokens: str
    """Which tokens it holds. `samples`: this rank's own microbatch; `experts`: those sent to it by all data-parallel
    ranks; `counts`: numbers of the latter; `fixed`: none."""
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
    return connection.query(merge_query(connection, run, step, "run"))


def merge_query(
    connection: duckdb.DuckDBPyConnection,
    run: Run,
    step: int | None,
    prefix: str,
    *,
    kinds: tuple[str, ...] = (),
    by_rank: bool = False,
) -> str:
    """The merge as SQL text over views that are registered in `connection` under `prefix`.

    `by_rank` is for two runs of one layout: what has no known place in the whole is then added up over the ranks
    as it is, which is as good on both sides.

    Example::

        sql = merge_query(connection, run, 0, "golden", kinds=("activation",))
    """
    rows = run.rows(connection, step)
    if kinds:
        rows = rows.filter("kind in ({})".format(", ".join(f"'{kind}'" for kind in kinds)))
    connection.register(f"{prefix}_rows", rows)
    texts = [text or "" for (text,) in rows.project("shard").distinct().fetchall()]
    connection.register(f"{prefix}_layouts", _layout_table(texts, run.sizes, by_rank))
    connection.register(f"{prefix}_ranks", _rank_table(run))
    words = {
        "rows": f"{prefix}_rows",
        "layouts": f"{prefix}_layouts",
        "ranks": f"{prefix}_ranks",
        "key": ", ".join(KEY),
        "scale": repr(float(run.facts.get("gradient_scale") or 1.0)),
        "part": _PART,
        "dp_size": str(run.sizes.get("dp", 1)),
        "mbs": str(micro_batch_size(run, rows)),
    }
    query = _QUERY
    for word, value in words.items():
        query = query.replace("{" + word + "}", value)
    return query


def micro_batch_size(run: Run, rows: duckdb.DuckDBPyRelation) -> int:
    """Samples of one microbatch: what the job was told, else the batch dimension of a recorded tensor."""
    told = run.facts.get("arguments", {}).get("micro_batch_size")
    if isinstance(told, int) and told > 0:
        return told
    for text, shape in rows.filter("shard like '%b%'").project("shard, shape").distinct().limit(200).fetchall():
        spec = ShardSpec.parse(text)
        names = [dim.name for dim in spec.dims]
        if "b" in names and len(names) == len(shape):
            return int(shape[names.index("b")]) or 1
    return 1


def _rank_table(run: Run) -> pa.Table:
    """Place of every rank among the replicas of its experts, which rows do not carry."""
    table = run.facts.get("ranks", []) if run.facts.get("ranks_complete") else []
    places = {int(entry["rank"]): int(entry.get("edp", 0)) for entry in table}
    for rank, facts in run.ranks.items():
        places.setdefault(rank, int(facts.get("coordinates", {}).get("edp", 0)))
    for _, rank, _ in run.files:
        places.setdefault(rank, 0)
    return pa.table({"rank": pa.array(list(places), pa.int32()), "edp": pa.array(list(places.values()), pa.int32())})


def _layout_table(texts: list[str], sizes: dict[str, int], by_rank: bool) -> pa.Table:
    """One row a shard text: few of them, however many rows a run has."""
    layouts = [_layout(text, sizes) for text in texts]
    columns: dict[str, list[Any]] = {"shard": texts}
    for axis in _AXES:
        columns[f"cut_{axis}"] = [axis in layout.cut for layout in layouts]
    for name in ("tokens", "parts", "flat", "reason"):
        columns[name] = [getattr(layout, name) for layout in layouts]
    if by_rank:
        columns["reason"] = [""] * len(texts)
    return pa.table(columns)


def layout_of(text: str, sizes: dict[str, int]) -> Layout:
    """Which axes cut a tensor of this shard text.

    Example::

        >>> sorted(layout_of("s[cp:zigzag,tp] b h", {"cp": 2, "tp": 2}).cut)
        ['cp', 'tp']
    """
    return _layout(text, sizes)


def _layout(text: str, sizes: dict[str, int]) -> Layout:
    spec = ShardSpec.parse(text)
    if spec.unknown is not None:
        return Layout(frozenset(_AXES), "fixed", 0, "", spec.unknown)
    axes = {cut.axis for dim in spec.dims for cut in dim.cuts if cut.order != "samples"}
    names = {dim.name for dim in spec.dims}
    tokens = "samples" if names & {"b", "s*b"} else "experts" if "x" in names else "fixed"
    if names == {"e"}:
        tokens = "counts"
    if tokens in ("experts", "counts"):
        # Expert, expert-tensor and expert-data coordinates tell all ranks of a stage apart.
        axes.add("edp")
    if spec.partial:
        return Layout(frozenset(axes | set(spec.partial)), tokens, 0, "", f"partial over {', '.join(spec.partial)}")
    parts = 1
    for axis in axes:
        parts *= sizes.get(axis, 1)
    flat = f"{spec.flat[0]}:{spec.flat[1]}" if spec.flat is not None else ""
    return Layout(frozenset(axes), tokens, parts if not flat else 0, flat, "")


_PART = " || ',' || ".join(f"case when cut_{axis} then cast({axis} as varchar) else '' end" for axis in _AXES)

_QUERY = """
with scales as (
    select step as scale_step, max(max) as loss_scale from {rows}
    where kind = 'loss' and name = 'loss_scale' group by step
), labelled as (
    select {rows}.* exclude (sketch, extra, tensor), {layouts}.* exclude (shard), edp,
        case when microbatch is null then 0
             when tokens = 'samples' then (microbatch * {dp_size} + dp) * {mbs}
             else microbatch * {dp_size} * {mbs} end as samples_from,
        case when microbatch is null then 0
             when tokens = 'samples' then {mbs} else {dp_size} * {mbs} end as samples,
        {part} || '|' || flat as part,
        case kind when 'gradient' then {scale} * coalesce(loss_scale, 1)
                  when 'grad_reduced' then coalesce(loss_scale, 1) else 1 end as factor
    from {rows} join {layouts} using (shard) join {ranks} using (rank) left join scales on scale_step = step
), replicas as (
    select {key}, part, any_value(tokens) as tokens, any_value(op) as op, any_value(dtype) as dtype,
        arg_min(numel, rank) as numel, arg_min(min, rank) as min, arg_min(max, rank) as max,
        arg_min(sum, rank) as sum, arg_min(sumsq, rank) as sumsq, arg_min(absmax, rank) as absmax,
        arg_min(n_nan, rank) as n_nan, arg_min(n_posinf, rank) as n_posinf,
        arg_min(n_neginf, rank) as n_neginf, arg_min(n_zero, rank) as n_zero, arg_min(digest, rank) as digest,
        coalesce(max(sum) - min(sum), 0) as d_sum,
        coalesce(sqrt(max(sumsq)) - sqrt(min(sumsq)), 0) as d_norm,
        greatest(coalesce(max(max) - min(max), 0), coalesce(max(min) - min(min), 0)) as d_extreme,
        coalesce(max(n_nan) - min(n_nan) + max(n_posinf) - min(n_posinf) + max(n_neginf) - min(n_neginf), 0)
            + max(numel) - min(numel) as d_counts,
        coalesce(max(n_zero) - min(n_zero), 0) as d_zero,
        coalesce(max(digest) <> min(digest), false) as d_digest,
        count(*) filter (where sum is null and numel > 0) as unmeasured,
        min(rank) as rank, min(seq) as seq, count(*) as copies,
        any_value(factor) as factor, any_value(parts) as expected, any_value(reason) as reason,
        any_value(global_shape) as global_shape
    from labelled group by {key}, part
)
select {key}, any_value(tokens) as tokens, any_value(op) as op, any_value(dtype) as dtype,
    any_value(global_shape) as global_shape,
    sum(numel) as numel, min(min) / any_value(factor) as min, max(max) / any_value(factor) as max,
    sum(sum) / any_value(factor) as sum, sum(sumsq) / (any_value(factor) * any_value(factor)) as sumsq,
    max(absmax) / any_value(factor) as absmax,
    sum(n_nan) as n_nan, sum(n_posinf) as n_posinf, sum(n_neginf) as n_neginf, sum(n_zero) as n_zero,
    case when count(digest) = count(*) then cast(sum(cast(digest as hugeint)) % 18446744073709551616 as ubigint)
        end as digest,
    count(*) as parts, any_value(expected) as expected_parts, max(copies) as copies,
    max(d_sum) / any_value(factor) as d_sum, max(d_norm) / any_value(factor) as d_norm,
    max(d_extreme) / any_value(factor) as d_extreme, max(d_counts) as d_counts, bool_or(d_digest) as d_digest,
    max(d_sum) = 0 and max(d_norm) = 0 and max(d_extreme) = 0 and max(d_counts) = 0 and max(d_zero) = 0
        and not bool_or(d_digest) as replicas_agree,
    min(rank) as rank, min(seq) as seq,
    case when any_value(reason) <> '' then any_value(reason)
         when any_value(expected) > 0 and count(*) <> any_value(expected)
            then count(*) || ' of ' || any_value(expected) || ' parts'
         when sum(unmeasured) > 0 then 'without statistics on ' || cast(sum(unmeasured) as bigint) || ' ranks'
         else '' end as reason
from replicas group by {key}
"""
