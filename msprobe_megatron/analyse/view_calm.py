"""What was looked at and found in order, in one sentence: the other half of a verdict.

Silence says nothing of a part that was not switched on; each part that looked says how much it looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.view_table import View


def in_order(view: View, *, finite: bool, alike: bool, alerts: int, suspects: int) -> str:
    """The sentence; empty where nothing was looked at, or nothing of it was in order.

    Example::

        in_order(view, finite=True, alike=True, alerts=0, suspects=0)
    """
    found = [*_tensors(view, finite, alike)]
    if not suspects:
        found += _examined(view.run)
    if not alerts:
        found += [*_compared(view.run), *_watched(view.run)]
    if not found:
        return ""
    steps, ranks = len(view.run.steps), len({rank for _, rank, _ in view.run.files} or view.run.ranks)
    recorded = f"{steps} step{'s' * (steps != 1)}, " if steps else ""
    return f"{recorded}{ranks} rank{'s' * (ranks != 1)}: {', '.join(found)}."


def _tensors(view: View, finite: bool, alike: bool) -> Iterator[str]:
    (tensors, copies) = view.ask("select count(*), count(*) filter (copies > 1) from whole")[0]
    if finite and tensors:
        yield f"no NaN and no Inf in {tensors:,} tensors"
    if alike and copies:
        yield f"replicas agree on all {copies:,} tensors that several ranks hold"


def _examined(run: Run) -> Iterator[str]:
    if run.perturb:
        looks, names = run.perturb_rows().aggregate("count(*), count(distinct name)").fetchall()[0]
        yield f"no suspect in {looks:,} looks at {names:,} operator{'s' * (names != 1)}"


def _compared(run: Run) -> Iterator[str]:
    checks = _ledgers(run, "checks")
    times = max((int(entry.get("compared") or 0) for entry in checks), default=0)
    if times:
        labels = ", ".join(dict.fromkeys(label for entry in checks for label in entry.get("groups", {})))
        yield f"ranks held the same in {times:,} comparison{'s' * (times != 1)} ({labels})"


def _watched(run: Run) -> Iterator[str]:
    rules = dict.fromkeys(str(rule) for entry in _ledgers(run, "alerts") for rule in entry.get("asked") or ())
    if rules:
        yield f"no alert ({', '.join(rules)})"
    recorders = _ledgers(run, "recorder")
    if recorders and not any(entry.get("written") for entry in recorders):
        yield "the flight recorder had no reason to write"


def _ledgers(run: Run, part: str) -> list[dict[str, Any]]:
    """What a part tells of itself on every rank."""
    found = [facts.get("ledger", {}).get(part) for facts in run.ranks.values()]
    return [entry for entry in found if isinstance(entry, dict)]
