"""Shard specs given by the user: rows that a rule fits are read with its spec in place of the recorded one.

Stands between the Parquet files and everything that merges. Digests and sketches number the elements as they were
recorded, so those of rows whose spec changes are left out; statistics and saved tensors need no number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count

import duckdb
import pyarrow as pa

from msprobe_megatron.config.name_patterns import name_matcher
from msprobe_megatron.config.sections.shards import ShardRule
from msprobe_megatron.topology.shards import ShardSpec

_NUMBER = count()
_WHAT = ("kind", "name", "io", "path")


def with_rules(
    connection: duckdb.DuckDBPyConnection,
    rows: duckdb.DuckDBPyRelation,
    rules: Sequence[ShardRule],
    sizes: dict[str, int],
) -> duckdb.DuckDBPyRelation:
    """The rows as the rules tell them."""
    name = f"ruled_{next(_NUMBER)}"
    connection.register(f"{name}_rows", rows)
    found = connection.execute(f"select distinct {', '.join(_WHAT)}, len(shape) from {name}_rows").fetchall()  # noqa: S608
    lines = [(*what, *_spec(rule, what[4], sizes)) for what in found if (rule := first_rule(rules, *what[:4]))]
    columns = list(zip(*lines, strict=True)) or [()] * 7
    table = pa.table(
        {
            **{key: pa.array(columns[i], pa.string()) for i, key in enumerate(_WHAT)},
            "ndim": pa.array(columns[4], pa.int64()),
            "given": pa.array(columns[5], pa.string()),
            "factors": pa.array(columns[6], pa.list_(pa.int64())),
        }
    )
    connection.register(f"{name}_rules", table)
    return connection.query(
        f"""select rows.* replace (
            coalesce(given, shard) as shard,
            case when given is null then global_shape else
                [shape[i] * factors[i] for i in range(1, len(factors) + 1)] end as global_shape,
            case when given is null or given = shard then digest end as digest,
            case when given is null or given = shard then sketch end as sketch)
        from {name}_rows as rows left join {name}_rules as rules on rows.kind = rules.kind and rows.name = rules.name
            and rows.io = rules.io and rows.path = rules.path and len(rows.shape) = rules.ndim"""  # noqa: S608
    )


def first_rule(rules: Sequence[ShardRule], kind: str, name: str, io: str, path: str) -> ShardRule | None:
    """The rule that counts for a tensor.

    Example::

        >>> first_rule([ShardRule("mlp", "s b h")], "activation", "decoder.layers.0.mlp", "output", "0").shard
        's b h'
    """
    for rule in rules:
        fits = rule.kind in ("", kind) and rule.io in ("", io) and rule.path in (None, path)
        if fits and name_matcher(rule.name)(name):
            return rule
    return None


def _spec(rule: ShardRule, ndim: int, sizes: dict[str, int]) -> tuple[str, list[int] | None]:
    """Spec of a tensor of so many dimensions without the axes that the job does not use, and what each is cut by."""
    spec = ShardSpec.parse(rule.shard).only(lambda axis: sizes.get(axis, 1) > 1)
    if spec.unknown is not None:
        return str(spec), None
    if len(spec.dims) != ndim:
        return f"?{ndim} dimensions where '{rule.shard}' was given", None
    if any(cut.order == "unordered" for dim in spec.dims for cut in dim.cuts):
        return str(spec), None
    factors = [math.prod(cut.parts(sizes.get(cut.axis, 1)) for cut in dim.cuts) for dim in spec.dims]
    return str(spec), factors
