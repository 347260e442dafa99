"""Trends: every tensor of a run by step, microbatches put together, within a budget that keeps the page small.

A series belongs to one (kind, name, io, path, phase). Where a run has more than the page can carry, steps are thinned
first and then deep modules left out; what was left out is said.
"""

from __future__ import annotations

from typing import Any

from msprobe_megatron.analyse.view_table import View, packed, short

CELLS = 150_000
"""Most (series, step) pairs that a page carries; each costs about 40 bytes."""
_FEWEST_STEPS = 16

_KEY = "kind, name, io, path, phase"
_QUERY = """
select kind, name, io, path, phase, step,
    case when coalesce(sum(n_nan + n_posinf + n_neginf), 0) < sum(numel) then sqrt(sum(sumsq)) end as norm,
    min(min), max(max),
    sum(sum) / nullif(sum(numel) - sum(n_nan + n_posinf + n_neginf), 0) as mean,
    sum(n_zero) / nullif(sum(numel), 0) as zeros, coalesce(sum(n_nan + n_posinf + n_neginf), 0) as bad,
    sum(numel) as numel, count(*) as tensors, any_value(op) as op, any_value(dtype) as dtype,
    any_value(cast(global_shape as varchar)) as shape, max(reason) as reason, min(rank) as rank, min(seq) as seq
from whole join shown_steps using (step) join shown_keys using (kind, name, io, path, phase)
group by kind, name, io, path, phase, step order by kind, name, io, path, phase, step
"""


def series(view: View, important: set[int] | None = None, cells: int = CELLS) -> dict[str, Any]:
    """All series: `steps`, `tensors` (one entry a series) and `notes` of what was left out.

    Figures are lists over `steps`, or one value where all are equal. `important` steps are kept when steps are thinned.

    Example::

        series(open_view(run))["tensors"][0]["norm"]
    """
    notes: list[str] = []
    keys = view.ask(f"select {_KEY}, sum(n_nan + n_posinf + n_neginf) > 0 from whole group by {_KEY}")  # noqa: S608
    if not keys:
        return {"steps": [], "tensors": [], "notes": notes}
    steps = thinned(view.run.steps, max(_FEWEST_STEPS, cells // max(len(keys), 1)), important or set())
    if len(steps) < len(view.run.steps):
        notes.append(f"Trends show {len(steps)} of {len(view.run.steps)} recorded steps.")
    most = max(1, cells // len(steps))
    if len(keys) > most:
        keys.sort(key=lambda key: (not key[5], key[1].count("."), key[:5]))
        notes.append(f"Trends show {most} of {len(keys)} tensors: non-finite ones first, then the outer modules.")
    view.connection.execute("create or replace temp table shown_steps (step bigint)")
    view.connection.executemany("insert into shown_steps values (?)", [[step] for step in steps])
    columns = ", ".join(f"{name} varchar" for name in _KEY.split(", "))
    view.connection.execute(f"create or replace temp table shown_keys ({columns})")
    view.connection.executemany("insert into shown_keys values (?, ?, ?, ?, ?)", [list(key[:5]) for key in keys[:most]])
    return {"steps": steps, "tensors": _tensors(view.ask(_QUERY), steps), "notes": notes}


def thinned(steps: list[int], most: int, important: set[int]) -> list[int]:
    """At most about `most` steps, evenly spread, with the first, the last and the important ones.

    Example::

        >>> thinned(list(range(100)), 3, {17})
        [0, 17, 33, 66, 99]
    """
    if len(steps) <= most:
        return list(steps)
    even = {steps[round(i * (len(steps) - 1) / most)] for i in range(most)}
    return sorted(even | {steps[0], steps[-1]} | (important & set(steps)))


def _tensors(rows: list[tuple[Any, ...]], steps: list[int]) -> list[dict[str, Any]]:
    place = {step: i for i, step in enumerate(steps)}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        entry = found.get(row[:5])
        if entry is None:
            entry = dict(zip(("kind", "name", "io", "path", "phase"), row[:5], strict=True))
            for figure in ("norm", "min", "max", "mean", "zeros", "bad", "numel"):
                entry[figure] = [None] * len(steps)
            entry |= {"tensors": row[13], "op": row[14], "dtype": row[15], "shape": row[16] or "", "seq": row[19]}
            entry["reason"] = row[17] or ""
            found[row[:5]] = entry
        at = place[row[5]]
        for figure, value in zip(("norm", "min", "max", "mean", "zeros"), row[6:11], strict=True):
            entry[figure][at] = short(value)
        entry["bad"][at], entry["numel"][at] = int(row[11]), int(row[12])
    for entry in found.values():
        for figure in ("norm", "min", "max", "mean", "zeros", "bad", "numel"):
            entry[figure] = packed(entry[figure])
    return sorted(found.values(), key=lambda entry: (entry["seq"], entry["name"]))


def losses(view: View) -> dict[str, Any]:
    """Mean loss of every step by its name, and the norm of all reduced gradients.

    Loss functions report a sum and a count, or a mean, for each microbatch: the quotient is the mean.
    """
    found: dict[str, Any] = {"steps": view.run.steps, "losses": {}, "gradient_norm": None}
    place = {step: i for i, step in enumerate(view.run.steps)}
    rows = view.ask(
        """select name, step, sum(sum) filter (path in ('', '0'))
            / coalesce(sum(sum) filter (path = '1'), count(*)), sum(n_nan + n_posinf + n_neginf)
        from run_rows where kind = 'loss' and io = 'output' and name <> 'loss_scale' and path in ('', '0', '1')
        group by name, step order by name, step"""
    )
    for name, step, value, bad in rows:
        line = found["losses"].setdefault(name, [None] * len(place))
        line[place[step]] = None if bad else short(value)
    rows = view.ask(
        """select step, sqrt(sum(sumsq)), sum(n_nan + n_posinf + n_neginf) from whole
        where kind = 'grad_reduced' and reason = '' group by step"""
    )
    if rows:
        found["gradient_norm"] = [None] * len(place)
        for step, value, bad in rows:
            found["gradient_norm"][place[step]] = None if bad else short(value)
    return found
