"""Rows for other tools: merged tensors, what each rank holds, and scalars by step; streamed, nothing left out."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from msprobe_megatron.analyse.view_table import View

_BATCH = 20_000
_NON_FINITE = "n_nan + n_posinf + n_neginf"
_MEAN = f"sum / nullif(numel - ({_NON_FINITE}), 0)"
_FIGURES = f"numel, min, max, {_MEAN} as mean, sqrt(sumsq) as norm, absmax, n_nan, n_posinf, n_neginf, n_zero"
WHOLE_COLUMNS = (
    *("step", "microbatch", "phase", "kind", "name", "io", "path", "op", "dtype", "global_shape"),
    *("numel", "min", "max", "mean", "norm", "absmax", "n_nan", "n_posinf", "n_neginf", "n_zero"),
    *("parts", "replicas_agree", "reason"),
)
RANK_COLUMNS = (
    *("step", "microbatch", "phase", "seq", "rank", "tp", "pp", "vpp", "dp", "cp", "ep", "etp"),
    *("kind", "name", "io", "path", "op", "dtype", "shape", "shard"),
    *("numel", "min", "max", "mean", "norm", "absmax", "n_nan", "n_posinf", "n_neginf", "n_zero"),
)


def whole_rows(view: View) -> Iterator[tuple[Any, ...]]:
    """Merged tensors in order of step and execution, in the columns of `WHOLE_COLUMNS`.

    Example::

        next(whole_rows(open_view(run)))
    """
    yield from _stream(
        view,
        f"""select step, microbatch, phase, kind, name, io, path, op, dtype, cast(global_shape as varchar), {_FIGURES},
            parts, replicas_agree, reason from whole order by step, microbatch nulls last, seq, name, io, path""",  # noqa: S608
    )


def rank_rows(view: View) -> Iterator[tuple[Any, ...]]:
    """What each rank holds, in the columns of `RANK_COLUMNS`.

    Example::

        next(rank_rows(open_view(run)))
    """
    yield from _stream(
        view,
        f"""select step, microbatch, phase, seq, rank, tp, pp, vpp, dp, cp, ep, etp, kind, name, io, path, op, dtype,
            cast(shape as varchar), shard, {_FIGURES} from run_rows order by step, rank, seq, name, io, path""",  # noqa: S608
    )


def scalars(view: View) -> Iterator[tuple[int, str, float]]:
    """(step, tag, value) of every merged tensor by step, microbatches put together; what has no value is left out.

    Example::

        next(scalars(view))     # (0, "activation/decoder.layers.0/output/norm", 12.5)
    """
    query = f"""
        select step, kind, name, io, path, phase, sqrt(sum(sumsq)), max(absmax), min(min), max(max),
            sum(sum) / nullif(sum(numel) - sum({_NON_FINITE}), 0), sum(n_zero) / nullif(sum(numel), 0),
            sum({_NON_FINITE})
        from whole group by step, kind, name, io, path, phase order by step, kind, name, io, path, phase"""  # noqa: S608
    figures = ("norm", "absmax", "min", "max", "mean", "zeros", "non_finite")
    for step, kind, name, io, path, phase, *values in _stream(view, query):
        place = f"{kind}/{name}/{io}" + (f".{path}" if path else "") + ("/recompute" if phase == "recompute" else "")
        for figure, value in zip(figures, values, strict=True):
            if value is not None:
                yield step, f"{place}/{figure}", float(value)


def _stream(view: View, query: str) -> Iterator[tuple[Any, ...]]:
    result = view.connection.execute(query)
    while rows := result.fetchmany(_BATCH):
        yield from rows


def started(view: View) -> float:
    """When the run began, in seconds since 1970; 0 where it does not say.

    Example::

        started(open_view(run))     # 1767225600.0
    """
    try:
        moment = datetime.fromisoformat(str(view.run.facts.get("started")).replace("Z", "+00:00"))
    except ValueError:
        return 0.0
    return moment.timestamp()
