"""Laws of communication: a message arrives as it was sent, and collectives keep sums and squares."""

from __future__ import annotations

import math
from typing import Any

from msprobe_megatron.analysis.diagnose.exchanges import MatchedExchange, exchanges
from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked
from msprobe_megatron.analysis.laws.scene import Scene

_KEEP = ("all_to_all", "all_to_all_single", "alltoall", "all_to_all_base")


def conserved(scene: Scene) -> list[Breach]:
    """What came out of a collective is what its ranks put in."""
    found: list[tuple[MatchedExchange, str]] = []
    looked = 0
    for step in scene.steps:
        for exchange in exchanges(scene.run, step.number):
            looked += 1
            text = exchange.finding or _conserved(exchange)
            if text:
                found.append((exchange, text))
    if not looked:
        raise NotChecked("communication: dump: {level: mix}, or monitor: {comm: true} in a run without a dump")
    if not found:
        return []
    first, text = found[0]
    when = f"step {first.step}" + ("" if first.microbatch is None else f", microbatch {first.microbatch}")
    name = f"{first.op} over {first.group} in {first.module or 'no module'}"
    where: dict[str, Any] = {
        "step": first.step,
        "microbatch": first.microbatch,
        "phase": first.phase,
        "kind": "comm",
        "name": first.module,
        "ranks": first.ranks,
        "tensors": len(found),
    }
    return [Breach(f"{name}: {text} ({when}, ranks {first.ranks}); {len(found)} of {looked} in all", where)]


def _conserved(exchange: MatchedExchange) -> str:
    """What does not fit in a collective that moves or gathers without changing."""
    if (
        exchange.op not in _KEEP
        or set(exchange.inputs) != set(exchange.ranks)
        or set(exchange.outputs) != set(exchange.ranks)
    ):
        return ""
    given = sum(norm**2 for _, norm in exchange.inputs.values())
    taken = sum(norm**2 for _, norm in exchange.outputs.values())
    if math.isnan(given) or math.isnan(taken) or abs(given - taken) <= 1e-9 * max(given, taken):
        return ""
    return f"squares sum to {given:.9g} before and {taken:.9g} after"


LAWS = (
    Law(
        "communication",
        "a message arrives as it was sent; results of a group agree; an all-to-all only moves",
        "a stale buffer, a wrong peer, ranks that do not take part",
        "dump: {level: mix}, or monitor: {comm: true}",
        "one reading of what goes in and what comes out",
        conserved,
        "look at the call that is named, on all its ranks",
    ),
)
