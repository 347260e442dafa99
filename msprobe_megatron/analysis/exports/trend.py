"""Rows for the trend viewer of msprobe's TensorBoard plug-in: targets, metrics, tags and figures by rank and step.

Its heat maps know four statistics of a target (a module's input or output, or a weight) under a metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from msprobe_megatron.analysis.page.table import RunView

METRICS = {
    ("activation", "forward"): "forward",
    ("activation", "recompute"): "recompute",
    ("gradient", "backward"): "backward",
    ("grad_reduced", "optimizer"): "parameters_grad",
    ("parameter", "optimizer"): "parameters",
}
WATCHED = {
    # What only a monitor sees, or sees all along.
    ("grad_unreduced", "backward"): "grad_unreduced",
    ("grad_clipped", "optimizer"): "grad_clipped",
    ("optimizer_state", "optimizer"): "optimizer_state",
    ("update", "optimizer"): "update",
    ("loss", "forward"): "loss",
    ("loss", "optimizer"): "loss",
    ("scalar", "forward"): "scalar",
    ("scalar", "optimizer"): "scalar",
    ("throughput", "optimizer"): "throughput",
}
STATISTICS = ("norm", "max", "min", "mean")
LARGEST = 1e9
"""The viewer's colours end here; infinities stand one above."""

_QUERY = """
select rank, step, kind, phase, name || '.' || io || case when path = '' then '' else '.' || path end as target,
    coalesce(vpp, 0), coalesce(microbatch, 0),
    case when bool_or(n_posinf + n_neginf > 0) then 'inf'::double when bool_or(n_nan > 0) then 'nan'::double
         else sqrt(sum(sumsq)) end,
    case when bool_or(n_posinf > 0) then 'inf'::double else max(max) end,
    case when bool_or(n_neginf > 0) then '-inf'::double else min(min) end,
    sum(sum) / nullif(sum(numel), 0)
from run_rows where dtype like 'float%' or dtype like 'bfloat%'
group by rank, step, kind, phase, target, coalesce(vpp, 0), coalesce(microbatch, 0)
order by rank, step, kind, target
"""


class TrendRow(NamedTuple):
    """One row of the viewer: a target's figures on a rank in a step."""

    rank: int
    step: int
    metric: str
    target: tuple[str, int, int]
    figures: tuple[float | None, ...]


def trend_rows(view: RunView) -> Iterator[TrendRow]:
    """Everything the viewer can show of a run."""
    yield from _rows_of(view, _QUERY)
    if view.run.monitor:
        # Numbers of a rank are no tensors, and not among those of the view.
        numbers = view.run.monitor_rows(view.connection).filter("kind in ('scalar', 'throughput')")
        view.connection.register("rank_numbers", numbers)
        yield from _rows_of(view, _QUERY.replace("run_rows", "rank_numbers"))


def _rows_of(view: RunView, query: str) -> Iterator[TrendRow]:
    metrics = {**METRICS, **WATCHED} if view.run.monitor else METRICS
    result = view.connection.execute(query)
    while rows := result.fetchmany(20_000):
        for rank, step, kind, phase, name, vpp, microbatch, *figures in rows:
            metric = metrics.get((kind, phase))
            if metric is not None:
                values = tuple(_clipped(value) for value in figures)
                yield TrendRow(rank, step, metric, (name, vpp, microbatch), values)


def tags_of(name: str) -> list[tuple[str, str]]:
    """Tags of a target, each with its category; a number belongs to the word before it.

    Example::

        >>> tags_of("decoder.layers.0.mlp.output")
        [('decoder', 'module'), ('layers.0', 'layer'), ('mlp', 'module'), ('output', 'module')]
    """
    found: list[tuple[str, str]] = []
    for part in name.split("."):
        if part.isdigit() and found:
            found[-1] = (f"{found[-1][0]}.{part}", "layer")
        elif part:
            found.append((part, "module"))
    return list(dict.fromkeys(found))


def _clipped(value: Any) -> float | None:
    """Values beyond the viewer's range are put at its end, infinities one further; NaN is no value."""
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        return math.copysign(LARGEST + 1, value)
    return float(min(max(value, -LARGEST), LARGEST))
