"""Rows for other tools: merged tensors, what each rank holds, and scalars by step; streamed, nothing left out."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from msprobe_megatron.analysis.load.loss_units import log_losses
from msprobe_megatron.analysis.page.table import RunView

_BATCH = 20_000
_NON_FINITE = "n_nan + n_posinf + n_neginf"
_MEAN = f"sum / nullif(numel - ({_NON_FINITE}), 0)"
_STATISTICS = ("numel", "min", "max", "mean", "norm", "absmax", "n_nan", "n_posinf", "n_neginf", "n_zero")
_SQL_STATISTICS = f"numel, min, max, {_MEAN} as mean, sqrt(sumsq) as norm, absmax, n_nan, n_posinf, n_neginf, n_zero"
WHOLE_COLUMNS = (
    "step",
    "microbatch",
    "phase",
    "kind",
    "name",
    "io",
    "path",
    "op",
    "dtype",
    "global_shape",
    *_STATISTICS,
    "parts",
    "replicas_agree",
    "reason",
)
RANK_COLUMNS = (
    "step",
    "microbatch",
    "phase",
    "seq",
    "rank",
    "tp",
    "pp",
    "vpp",
    "dp",
    "cp",
    "ep",
    "etp",
    "kind",
    "name",
    "io",
    "path",
    "op",
    "dtype",
    "shape",
    "shard",
    *_STATISTICS,
)


def whole_rows(view: RunView) -> Iterator[tuple[Any, ...]]:
    """Merged tensors in order of step and execution, in the columns of `WHOLE_COLUMNS`."""
    yield from _stream(
        view,
        f"""select step, microbatch, phase, kind, name, io, path, op, dtype, cast(global_shape as varchar),
            {_SQL_STATISTICS}, parts, replicas_agree, reason
            from whole order by step, microbatch nulls last, seq, name, io, path""",  # noqa: S608
    )


def rank_rows(view: RunView) -> Iterator[tuple[Any, ...]]:
    """What each rank holds, in the columns of `RANK_COLUMNS`."""
    yield from _stream(
        view,
        f"""select step, microbatch, phase, seq, rank, tp, pp, vpp, dp, cp, ep, etp, kind, name, io, path, op, dtype,
            cast(shape as varchar), shard, {_SQL_STATISTICS} from run_rows order by step, rank, seq, name, io, path""",  # noqa: S608
    )


def scalars(view: RunView) -> Iterator[tuple[int, str, float]]:
    """(step, tag, value) of every merged tensor by step, microbatches merged; missing values are skipped.

    Losses come in the units of Megatron's log, as ``loss/lm loss``.
    """
    for name, points in log_losses(view.connection, "run_rows").items():
        yield from ((step, f"loss/{name}", value) for step, value in points)
    query = f"""
        select step, kind, name, io, path, phase, sqrt(sum(sumsq)), max(absmax), min(min), max(max),
            sum(sum) / nullif(sum(numel) - sum({_NON_FINITE}), 0), sum(n_zero) / nullif(sum(numel), 0),
            sum({_NON_FINITE})
        from whole where kind <> 'loss' or io <> 'output'
        group by step, kind, name, io, path, phase order by step, kind, name, io, path, phase"""  # noqa: S608
    statistics = ("norm", "absmax", "min", "max", "mean", "zeros", "non_finite")
    for step, kind, name, io, path, phase, *values in _stream(view, query):
        place = f"{kind}/{name}/{io}" + (f".{path}" if path else "") + ("/recompute" if phase == "recompute" else "")
        for statistic, value in zip(statistics, values, strict=True):
            if value is not None:
                yield step, f"{place}/{statistic}", float(value)


def _stream(view: RunView, query: str) -> Iterator[tuple[Any, ...]]:
    result = view.connection.execute(query)
    while rows := result.fetchmany(_BATCH):
        yield from rows


def started(view: RunView) -> float:
    """When the run began, in seconds since 1970; 0 where it does not say."""
    try:
        moment = datetime.fromisoformat(str(view.run.facts.get("started")).replace("Z", "+00:00"))
    except ValueError:
        return 0.0
    return moment.timestamp()
