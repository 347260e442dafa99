"""Communication on the page: what was exchanged in the step that matters, those that do not fit first."""

from __future__ import annotations

from typing import Any

from msprobe_megatron.analyse.exchanges import Exchange, exchanges, totals
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.view_table import short

_SHOWN = 300


def communication(run: Run, steps: list[int]) -> dict[str, Any]:
    """Exchanges of the first of `steps` that has any, those that do not fit first; empty where none were recorded.

    Example::

        communication(run, [10])["totals"]
    """
    for step in steps:
        found = exchanges(run, step)
        if found:
            order = sorted(found, key=lambda x: not x.finding)
            return {
                "step": step,
                "totals": totals(found),
                "count": len(found),
                "wrong": sum(bool(x.finding) for x in found),
                "first": [_plain(x) for x in order[:_SHOWN]],
                "notes": [f"{_SHOWN} of {len(found)} exchanges are shown."] if len(found) > _SHOWN else [],
            }
    return {"step": None, "totals": [], "count": 0, "wrong": 0, "first": [], "notes": []}


def _plain(exchange: Exchange) -> dict[str, Any]:
    return {
        "op": exchange.op,
        "group": exchange.group,
        "ranks": exchange.ranks,
        "module": exchange.module,
        "microbatch": exchange.microbatch,
        "phase": exchange.phase,
        "bytes": exchange.bytes,
        "norms": {rank: short(norm) for rank, (_, norm) in sorted(exchange.outputs.items())[:8]},
        "finding": exchange.finding,
    }
