"""Communication on the page: what was exchanged in the step that matters, and what carried a value on its way."""

from __future__ import annotations

from collections.abc import Mapping
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


def carry(flow: list[dict[str, Any]], found: list[Exchange], ranks_of: Mapping[str, list[int]]) -> None:
    """Add to each stop of a flow what carried its value: the collectives of its module, the message before its stage.

    `ranks_of` tells the ranks that have a module. Example::

        carry(flow(comparison), exchanges(run, 10), {"decoder.layers.2": [2, 3]})
    """
    before: set[int] | None = None
    for stop in flow:
        here = set(ranks_of.get(stop["name"], ()))
        same = [x for x in found if x.microbatch == stop["microbatch"] and x.phase == stop["phase"]]
        carried = [x for x in same if x.module == stop["name"] and stop["io"] == "output"]
        if before is not None and here and not here & before:
            carried += [x for x in same if x.op == "send" and x.ranks[0] in before and x.ranks[1] in here]
        stop["carried"] = [_words(x) for x in carried[:4]]
        before = here or before


def _words(exchange: Exchange) -> str:
    who = (
        f"rank {exchange.ranks[0]} to rank {exchange.ranks[1]}"
        if exchange.op == "send"
        else f"over {exchange.group}, ranks {', '.join(map(str, exchange.ranks[:8]))}"
    )
    wrong = f": {exchange.finding}" if exchange.finding else ""
    return f"{exchange.op} {who}, {exchange.bytes / 1024:.1f} KiB{wrong}"
