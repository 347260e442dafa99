"""Merging shards: from the rows of all ranks to the tensors that a run on one device would have recorded.

A row's shard spec says which parallel axes split its tensor. Ranks that differ only along other axes hold the same
part: they are replicas, of which one is used and all must agree. The parts then combine: sums and counts are added,
minima and maxima reduced. All of it is one SQL query, so 1,000 ranks need no more Python than two.

A worked example, TP2 x CP2 merged to one device. Without sequence parallelism the output of a row-parallel layer is
split along the sequence by context parallelism only, so the two tensor-parallel ranks of each part are replicas; with
sequence parallelism each rank holds a part of its own::

    >>> sizes = {"tp": 2, "cp": 2}
    >>> ranks = {0: {"cp": 0, "tp": 0}, 1: {"cp": 0, "tp": 1}, 2: {"cp": 1, "tp": 0}, 3: {"cp": 1, "tp": 1}}
    >>> plan = merge_plan("s[cp:zigzag] b h", sizes)
    >>> sorted(plan.cut), plan.parts, plan.replica_groups(ranks)
    (['cp'], 2, [[0, 1], [2, 3]])
    >>> plan = merge_plan("s[cp:zigzag,tp] b h", sizes)
    >>> sorted(plan.cut), plan.parts, plan.replica_groups(ranks)
    (['cp', 'tp'], 4, [[0], [1], [2], [3]])

The merged norm is then the root of the sum of squares of one rank of each group: of ranks 0 and 2 in the first case.

Every merged tensor carries the samples of the global batch that it was computed from. Megatron assigns them by
microbatch, then data-parallel rank: microbatch m of rank d of a run with micro-batch size b holds the samples from
(m * dp + d) * b. Tokens that were routed to experts come from all data-parallel ranks at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import pyarrow as pa

from msprobe_megatron.analysis.compare.call_layouts import is_sum
from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.topology.shards import ShardSpec

KEY = ("step", "microbatch", "samples_from", "samples", "phase", "kind", "name", "io", "path")
AXES = ("tp", "pp", "dp", "cp", "ep", "etp", "edp")


@dataclass(frozen=True)
class MergePlan:
    """How the shards of one shard spec become a whole tensor."""

    cut: frozenset[str]
    """Axes along which ranks hold different parts."""
    tokens: str
    """Which tokens it holds. `samples`: the rank's own microbatch; `experts`: those routed to it by all data-parallel
    ranks; `counts`: numbers of the latter; `fixed`: none."""
    parts: int
    """Number of parts of the whole; 0 where it is not known beforehand."""
    flat: str
    reason: str
    """Why the shards cannot be merged; empty if they can."""
    dims: str
    neighbours: Mapping[str, int] = field(default_factory=dict)
    """Number of neighbouring ranks that hold the same part, for axes with fewer parts than ranks."""

    def part(self, place: Mapping[str, int]) -> tuple[int, ...]:
        """The part that the rank at these coordinates holds; equal for replicas. `SQL_PART` is the same in SQL."""
        return tuple(place.get(axis, 0) // self.neighbours.get(axis, 1) if axis in self.cut else -1 for axis in AXES)

    def replica_groups(self, ranks: Mapping[int, Mapping[str, int]]) -> list[list[int]]:
        """Ranks that hold the same part, one list per part; `ranks` are the coordinates of every rank."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in sorted(ranks.items()):
            groups.setdefault(self.part(place), []).append(rank)
        return list(groups.values())


def merge_plan(shard: str, sizes: Mapping[str, int]) -> MergePlan:
    """The plan for a shard spec in a run with these axis sizes; see the example at the top of this file."""
    spec = ShardSpec.parse(shard)
    if spec.unknown is not None:
        return MergePlan(frozenset(AXES), "fixed", 0, "", spec.unknown, "")
    cuts = {cut.axis: cut for dim in spec.dims for cut in dim.cuts if cut.order != "samples"}
    axes = set(cuts)
    names = [dim.name for dim in spec.dims]
    tokens = _tokens({*names})
    if tokens in ("experts", "counts"):
        # Expert, expert-tensor and expert-data coordinates together identify every rank of a stage.
        axes.add("edp")
    dims = " ".join(names)
    if spec.partial:
        reason = f"partial sums over {', '.join(spec.partial)}; only their sum is the whole tensor"
        return MergePlan(frozenset(axes | set(spec.partial)), tokens, 0, "", reason, dims)
    flat = f"{spec.flat[0]}:{spec.flat[1]}" if spec.flat is not None else ""
    shared = {axis: size // cut.parts(size) for axis, cut in cuts.items() if (size := sizes.get(axis, 1)) > 1}
    parts = 0 if flat else math.prod(sizes.get(axis, 1) // shared.get(axis, 1) for axis in axes)
    neighbours = {axis: ranks for axis, ranks in shared.items() if ranks > 1}
    return MergePlan(frozenset(axes), tokens, parts, flat, "", dims, neighbours)


def _tokens(dims: set[str]) -> str:
    if dims == {"e"}:
        return "counts"
    if dims & {"b", "s*b"}:
        return "samples"
    return "experts" if "x" in dims else "fixed"


def merged(run: Run, step: int | None = None) -> duckdb.DuckDBPyRelation:
    """One row per whole tensor: the key columns, statistics, `parts`, `expected_parts`, `replicas_agree`, `reason`.

    Activation gradients are divided by the run's gradient scale and by the loss scale, so that layouts can be
    compared. `reason` is empty where the merge is complete and otherwise says why it is not.
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
    beside: Mapping[str, int] | None = None,
) -> str:
    """The merge as SQL text over views that are registered in `connection` under `prefix`.

    `by_rank` is for two runs of one layout: tensors with no known place in the whole are then added up over the ranks
    as they are, which is the same on both sides. `rows` replaces the run's own rows. `beside` are the axis sizes of the
    run it is compared with: summands are then compared by their sum, or as they are if both have equally many.
    """
    rows = run.rows(connection, step) if rows is None else rows
    return _SQL_MERGE.format_map(_register(connection, run, rows, prefix, kinds, by_rank, beside))


def labelled_query(
    connection: duckdb.DuckDBPyConnection,
    run: Run,
    step: int | None,
    prefix: str,
    *,
    # The loss rows hold the loss scale.
    kinds: tuple[str, ...] = ("activation", "gradient", "parameter", "grad_reduced", "loss"),
    by_rank: bool = False,
) -> str:
    """The rows of tensors with a known place as SQL: their key, `part`, `samples_from`, the `factor` of gradients."""
    return _SQL_LABELLED.format_map(_register(connection, run, run.rows(connection, step), prefix, kinds, by_rank))


def _register(
    connection: duckdb.DuckDBPyConnection,
    run: Run,
    rows: duckdb.DuckDBPyRelation,
    prefix: str,
    kinds: tuple[str, ...],
    by_rank: bool,
    beside: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Register the rows, plans and ranks of a run as views; returns the values for the placeholders of a query."""
    # Choices of routers and tokens of passes have no statistics; `compare/routing.py` asks for them by their kind.
    chosen = (
        "kind in ({})".format(", ".join(f"'{kind}'" for kind in kinds)) if kinds else "kind not in ('routing', 'token')"
    )
    rows = rows.filter(chosen)
    connection.register(f"{prefix}_rows", rows)
    shards = [text or "" for (text,) in rows.project("shard").distinct().fetchall()]
    connection.register(f"{prefix}_plans", _plan_table(shards, run.sizes, by_rank, beside))
    connection.register(f"{prefix}_ranks", _rank_table(run))
    return {
        "rows": f"{prefix}_rows",
        "plans": f"{prefix}_plans",
        "ranks": f"{prefix}_ranks",
        "key": ", ".join(KEY),
        "scale": repr(float(run.facts.get("gradient_scale") or 1.0)),
        "part": SQL_PART,
        "dp_size": str(run.sizes.get("dp", 1)),
        "mbs": str(micro_batch_size(run, rows)),
    }


def micro_batch_size(run: Run, rows: duckdb.DuckDBPyRelation) -> int:
    """Samples per microbatch: the job's argument, else the batch dimension of a recorded tensor."""
    argument = run.facts.get("arguments", {}).get("micro_batch_size")
    if isinstance(argument, int) and argument > 0:
        return argument
    for text, shape in rows.filter("shard like '%b%'").project("shard, shape").distinct().limit(200).fetchall():
        spec = ShardSpec.parse(text)
        names = [dim.name for dim in spec.dims]
        if "b" in names and len(names) == len(shape):
            return int(shape[names.index("b")]) or 1
    return 1


def _rank_table(run: Run) -> pa.Table:
    """The expert-data coordinate of every rank, which rows do not carry."""
    table = run.facts.get("ranks", []) if run.facts.get("ranks_complete") else []
    places = {int(entry["rank"]): int(entry.get("edp", 0)) for entry in table}
    for rank, facts in run.ranks.items():
        places.setdefault(rank, int(facts.get("coordinates", {}).get("edp", 0)))
    for _, rank, _ in run.files:
        places.setdefault(rank, 0)
    return pa.table({"rank": pa.array(list(places), pa.int32()), "edp": pa.array(list(places.values()), pa.int32())})


def _plan_table(
    shards: list[str], sizes: dict[str, int], by_rank: bool, beside: Mapping[str, int] | None = None
) -> pa.Table:
    """One row per distinct shard spec: there are few of them, however many rows a run has."""
    plans = [merge_plan(shard, sizes) for shard in shards]
    columns: dict[str, list[Any]] = {"shard": shards, "plan": list(range(len(shards)))}
    columns["by_sum"] = [int(is_sum(shard)) for shard in shards]
    if beside is not None:
        for index, axes in enumerate(ShardSpec.parse(shard).partial for shard in shards):
            if axes:
                plan = plans[index]
                plans[index] = replace(plan, reason="", parts=math.prod(sizes.get(axis, 1) for axis in plan.cut))
                columns["by_sum"][index] = int(any(sizes.get(axis, 1) != beside.get(axis, 1) for axis in axes))
    for axis in AXES:
        columns[f"cut_{axis}"] = [axis in plan.cut for plan in plans]
        columns[f"share_{axis}"] = [plan.neighbours.get(axis, 1) for plan in plans]
    for name in ("tokens", "parts", "flat", "reason", "dims"):
        columns[name] = [getattr(plan, name) for plan in plans]
    if by_rank:
        columns["reason"] = [""] * len(shards)
    return pa.table(columns)


SQL_PART = ", ".join(f"case when cut_{axis} then {axis} // share_{axis} else -1 end" for axis in AXES)
"""`MergePlan.part` in SQL."""

# Rows are grouped by the hash of their names, which are joined again at the end: grouping millions of strings would
# take most of the time. Of replicas the smaller statistics are used; differences between them are kept in `d_...`.
_SQL_MERGE = """
with scales as (
    select step as scale_step, max(max) as loss_scale from {rows}
    where kind = 'loss' and name = 'loss_scale' group by step
), labelled as (
    select step, microbatch, hash(phase, kind, name, io, path) as id, rank, seq, numel, min, max, sum, sumsq, absmax,
        n_nan, n_posinf, n_neginf, n_zero, digest, plan,
        case when microbatch is null then 0
             when tokens = 'samples' then (microbatch * {dp_size} + dp) * {mbs}
             else microbatch * {dp_size} * {mbs} end as samples_from,
        case when microbatch is null then 0
             when tokens = 'samples' then {mbs} else {dp_size} * {mbs} end as samples,
        hash({part}, flat) as part
    from {rows} join {plans} using (shard) join {ranks} using (rank)
), names as (
    select hash(phase, kind, name, io, path) as id, any_value(phase) as phase, any_value(kind) as kind,
        any_value(name) as name, any_value(io) as io, any_value(path) as path, any_value(op) as op,
        any_value(dtype) as dtype, any_value(global_shape) as global_shape
    from {rows} group by id
), replicas as (
    select step, microbatch, samples_from, samples, id, part,
        min(plan) as plan,
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
        min(plan) as plan,
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
        join (select plan, tokens, parts as expected_parts, reason as why, dims, by_sum from {plans}) using (plan)
        left join scales on scale_step = step
)
select {key}, tokens, op, dtype, global_shape, numel, min / factor as min, max / factor as max, sum / factor as sum,
    sumsq / (factor * factor) as sumsq, absmax / factor as absmax, n_nan, n_posinf, n_neginf, n_zero, bad, digest,
    parts, expected_parts, copies, d_sum / factor as d_sum, d_norm / factor as d_norm,
    d_extreme / factor as d_extreme, d_counts, d_digest,
    dims, by_sum, case dtype when 'float16' then 5.9604644775390625e-08 / factor else 0 end as quantum,
    part_high / (factor * factor) as part_high, part_low / (factor * factor) as part_low,
    d_sum = 0 and d_norm = 0 and d_extreme = 0 and d_counts = 0 and d_zero = 0 and not d_digest as replicas_agree,
    rank, seq,
    case when why <> '' then why
         when expected_parts > 0 and parts <> expected_parts then parts || ' of ' || expected_parts || ' parts'
         when unmeasured > 0 then 'without statistics on ' || cast(unmeasured as bigint) || ' ranks'
         else '' end as reason
from scaled
"""

_SQL_LABELLED = """
select step, phase, kind, name, io, path, rank, seq, sketch, hash({part}, flat) as part,
    numel, min, max, sum, sumsq, absmax, n_nan, n_posinf, n_neginf, n_zero, digest,
    tensor, dtype, shape, global_shape, shard, tokens, tp, pp, dp, cp, ep, etp, edp,
    case when microbatch is null then 0 when tokens = 'samples' then (microbatch * {dp_size} + dp) * {mbs}
         else microbatch * {dp_size} * {mbs} end as samples_from,
    case kind when 'gradient' then {scale} * coalesce(loss_scale, 1)
              when 'grad_reduced' then coalesce(loss_scale, 1) else 1 end as factor
from {rows} join {plans} using (shard) join {ranks} using (rank) left join (
    select step as scale_step, max(max) as loss_scale from {rows}
    where kind = 'loss' and name = 'loss_scale' group by step) on scale_step = step
where reason = '' and tokens <> 'counts'
"""
