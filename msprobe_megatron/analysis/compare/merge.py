"""Merging shards: from the rows of all ranks to the tensors that a run on one card would have seen.

Rows say by their shard spec which axes cut them. Parts add up (sums and counts add, minima and maxima combine);
ranks that hold the same part are replicas, of which one is taken and all must agree. Works as one
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
    dims: str


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
    rows: duckdb.DuckDBPyRelation | None = None,
) -> str:
    """The merge as SQL text over views that are registered in `connection` under `prefix`.

    `by_rank` is for two runs of one layout: what has no known place in the whole is then added up over the ranks
    as it is, which is as good on both sides. `rows` are taken in place of the run's own.

    Example::

        sql = merge_query(connection, run, 0, "golden", kinds=("activation",))
    """
    rows = run.rows(connection, step) if rows is None else rows
    words = _register(connection, run, rows, prefix, kinds, by_rank)
    return _filled(_QUERY, words)


def labelled_query(
    connection: duckdb.DuckDBPyConnection, run: Run, step: int | None, prefix: str, *, by_rank: bool = False
) -> str:
    """The rows of tensors with a place as SQL: what they are, `part`, `samples_from`, the `factor` of gradients."""
    # The loss rows hold the loss scale.
    kinds = ("activation", "gradient", "parameter", "grad_reduced", "loss")
    words = _register(connection, run, run.rows(connection, step), prefix, kinds, by_rank)
    return _filled(_LABELLED, words)


def _filled(query: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        query = query.replace("{" + word + "}", value)
    return query


def _register(
    connection: duckdb.DuckDBPyConnection,
    run: Run,
    rows: duckdb.DuckDBPyRelation,
    prefix: str,
    kinds: tuple[str, ...],
    by_rank: bool,
) -> dict[str, str]:
    """Make the rows, shard texts and ranks of a run known to the connection; the words to put into a query."""
    if kinds:
        rows = rows.filter("kind in ({})".format(", ".join(f"'{kind}'" for kind in kinds)))
    connection.register(f"{prefix}_rows", rows)
    texts = [text or "" for (text,) in rows.project("shard").distinct().fetchall()]
    connection.register(f"{prefix}_layouts", _layout_table(texts, run.sizes, by_rank))
    connection.register(f"{prefix}_ranks", _rank_table(run))
    return {
        "rows": f"{prefix}_rows",
        "layouts": f"{prefix}_layouts",
        "ranks": f"{prefix}_ranks",
        "key": ", ".join(KEY),
        "scale": repr(float(run.facts.get("gradient_scale") or 1.0)),
        "part": _PART,
        "dp_size": str(run.sizes.get("dp", 1)),
        "mbs": str(micro_batch_size(run, rows)),
    }


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
    columns: dict[str, list[Any]] = {"shard": texts, "layout": list(range(len(texts)))}
    for axis in _AXES:
        columns[f"cut_{axis}"] = [axis in layout.cut for layout in layouts]
    for name in ("tokens", "parts", "flat", "reason", "dims"):
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
        return Layout(frozenset(_AXES), "fixed", 0, "", spec.unknown, "")
    axes = {cut.axis for dim in spec.dims for cut in dim.cuts if cut.order != "samples"}
    names = {dim.name for dim in spec.dims}
    tokens = "samples" if names & {"b", "s*b"} else "experts" if "x" in names else "fixed"
    if names == {"e"}:
        tokens = "counts"
    if tokens in ("experts", "counts"):
        # Expert, expert-tensor and expert-data coordinates tell all ranks of a stage apart.
        axes.add("edp")
    dims = " ".join(dim.name for dim in spec.dims)
    if spec.partial:
        reason = f"summands over {', '.join(spec.partial)}, whose sum is the whole"
        return Layout(frozenset(axes | set(spec.partial)), tokens, 0, "", reason, dims)
    parts = 1
    for axis in axes:
        parts *= sizes.get(axis, 1)
    flat = f"{spec.flat[0]}:{spec.flat[1]}" if spec.flat is not None else ""
    return Layout(frozenset(axes), tokens, parts if not flat else 0, flat, "", dims)


_PART = ", ".join(f"case when cut_{axis} then {axis} else -1 end" for axis in _AXES)

# Names are grouped by their hash and joined again at the end: strings of millions of rows would take most of the time.
# Of replicas the smaller figures stand for all; where they differ, that is a finding of its own (`d_...`).
_QUERY = """
with scales as (
    select step as scale_step, max(max) as loss_scale from {rows}
    where kind = 'loss' and name = 'loss_scale' group by step
), labelled as (
    select step, microbatch, hash(phase, kind, name, io, path) as id, rank, seq, numel, min, max, sum, sumsq, absmax,
        n_nan, n_posinf, n_neginf, n_zero, digest, layout,
        case when microbatch is null then 0
             when tokens = 'samples' then (microbatch * {dp_size} + dp) * {mbs}
             else microbatch * {dp_size} * {mbs} end as samples_from,
        case when microbatch is null then 0
             when tokens = 'samples' then {mbs} else {dp_size} * {mbs} end as samples,
        hash({part}, flat) as part
    from {rows} join {layouts} using (shard) join {ranks} using (rank)
), names as (
    select hash(phase, kind, name, io, path) as id, any_value(phase) as phase, any_value(kind) as kind,
        any_value(name) as name, any_value(io) as io, any_value(path) as path, any_value(op) as op,
        any_value(dtype) as dtype, any_value(global_shape) as global_shape
    from {rows} group by id
), replicas as (
    select step, microbatch, samples_from, samples, id, part,
        min(layout) as layout,
        min(numel) as numel, min(min) as min, max(max) as max, min(sum) as sum, min(sumsq) as sumsq,
        max(absmax) as absmax, min(n_nan) as n_nan, min(n_posinf) as n_posinf, min(n_neginf) as n_neginf,
        min(n_zero) as n_zero, min(digest) as digest,
        max(n_nan + n_posinf + n_neginf) as bad,
        max(sum) - min(sum) as d_sum, sqrt(max(sumsq)) - sqrt(min(sumsq)) as d_norm,
        greatest(max(max) - min(max), max(min) - min(min)) as d_extreme,
        coalesce(max(n_nan) - min(n_nan) + max(n_posinf) - min(n_posinf) + max(n_neginf) - min(n_neginf), 0)
            + max(numel) - min(numel) as d_counts,
        max(n_zero) - min(n_zero) as d_zero, max(digest) <> min(digest) as d_digest,
        count(*) filter (where sum is null and numel > 0) as unmeasured,
        min(rank) as rank, min(seq) as seq, count(*) as copies
    from labelled group by step, microbatch, samples_from, samples, id, part
), whole as (
    select step, microbatch, samples_from, samples, id,
        min(layout) as layout,
        sum(numel) as numel, min(min) as min, max(max) as max, sum(sum) as sum, sum(sumsq) as sumsq,
        max(absmax) as absmax, sum(n_nan) as n_nan, sum(n_posinf) as n_posinf, sum(n_neginf) as n_neginf,
        sum(n_zero) as n_zero, coalesce(sum(bad), 0) as bad, max(sumsq) as part_high, min(sumsq) as part_low,
        case when count(digest) = count(*)
            then cast(sum(cast(digest as hugeint)) % 18446744073709551616 as ubigint) end as digest,
        count(*) as parts, max(copies) as copies, coalesce(max(d_sum), 0) as d_sum,
        coalesce(max(d_norm), 0) as d_norm, coalesce(max(d_extreme), 0) as d_extreme, max(d_counts) as d_counts,
        coalesce(max(d_zero), 0) as d_zero, coalesce(bool_or(d_digest), false) as d_digest,
        sum(unmeasured) as unmeasured, min(rank) as rank, min(seq) as seq
    from replicas group by step, microbatch, samples_from, samples, id
), scaled as (
    select *, case kind when 'gradient' then {scale} * coalesce(loss_scale, 1)
                        when 'grad_reduced' then coalesce(loss_scale, 1) else 1 end as factor
    from whole join names using (id)
        join (select layout, tokens, parts as expected_parts, reason as why, dims from {layouts}) using (layout)
        left join scales on scale_step = step
)
select {key}, tokens, op, dtype, global_shape, numel, min / factor as min, max / factor as max, sum / factor as sum,
    sumsq / (factor * factor) as sumsq, absmax / factor as absmax, n_nan, n_posinf, n_neginf, n_zero, bad, digest,
    parts, expected_parts, copies, d_sum / factor as d_sum, d_norm / factor as d_norm,
    d_extreme / factor as d_extreme, d_counts, d_digest,
    dims, case dtype when 'float16' then 5.9604644775390625e-08 / factor else 0 end as quantum,
    part_high / (factor * factor) as part_high, part_low / (factor * factor) as part_low,
    d_sum = 0 and d_norm = 0 and d_extreme = 0 and d_counts = 0 and d_zero = 0 and not d_digest as replicas_agree,
    rank, seq,
    case when why <> '' then why
         when expected_parts > 0 and parts <> expected_parts then parts || ' of ' || expected_parts || ' parts'
         when unmeasured > 0 then 'without statistics on ' || cast(unmeasured as bigint) || ' ranks'
         else '' end as reason
from scaled
"""

_LABELLED = """
select step, phase, kind, name, io, path, rank, sketch, hash({part}, flat) as part,
    tensor, dtype, shape, global_shape, shard, tokens, tp, pp, dp, cp, ep, etp, edp,
    case when microbatch is null then 0 when tokens = 'samples' then (microbatch * {dp_size} + dp) * {mbs}
         else microbatch * {dp_size} * {mbs} end as samples_from,
    case kind when 'gradient' then {scale} * coalesce(loss_scale, 1)
              when 'grad_reduced' then coalesce(loss_scale, 1) else 1 end as factor
from {rows} join {layouts} using (shard) join {ranks} using (rank) left join (
    select step as scale_step, max(max) as loss_scale from {rows}
    where kind = 'loss' and name = 'loss_scale' group by step) on scale_step = step
where reason = '' and tokens <> 'counts'
"""
