"""The way to the first divergence: tensors in order of cause, what each rank held of them, and what carried them.

The last part of a page beside a golden run. Stops come from the comparison; norms of ranks from the run's own rows, of
the same samples, which another layout may count as another microbatch; communication from matched exchanges.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pyarrow.compute as pc

from msprobe_megatron.analyse.compare import Comparison, Difference
from msprobe_megatron.analyse.exchanges import Exchange, exchanges
from msprobe_megatron.analyse.merge import micro_batch_size
from msprobe_megatron.analyse.view_table import View, short

_BEFORE, _AFTER = 7, 6
_RANKS = 8
_CARRIED = 4
_LAYER = re.compile(r"layers\.\d+")


def flow(comparison: Comparison) -> list[dict[str, Any]]:
    """Tensors just before, at and after the first divergence, in order of cause, with both sides' figures.

    Example::

        [(entry["name"], entry["state"]) for entry in flow(compare(golden, run))]
    """
    first = comparison.first_divergence
    if first is None or comparison.table is None:
        return []
    rows = comparison.table.filter(pc.equal(comparison.table["step"], first.step)).to_pylist()
    at = next((i for i, row in enumerate(rows) if _is(row, first)), None)
    if at is None:
        return []
    around = [i for i, row in enumerate(rows) if _together(row, rows[at])]
    here = around.index(at)
    return [_entry(rows[i], first=i == at) for i in around[max(0, here - _BEFORE) : here + _AFTER + 1]]


def follow(stops: list[dict[str, Any]], view: View) -> dict[str, Any]:
    """Add to each stop the norms that ranks hold of it and what carried it there; tells whether that was recorded.

    Example::

        follow(flow(comparison), open_view(run))["communication"]
    """
    if not stops:
        return {"communication": False}
    found = exchanges(view.run, stops[0]["step"])
    size = micro_batch_size(view.run, view.connection.table("run_rows"))
    before: set[int] | None = None
    for stop in stops:
        _own_microbatch(stop, size, view.run.sizes.get("dp", 1))
        stop["ranks"] = _held(stop, view)
        here = {rank for rank, *_ in stop["ranks"]}
        stop["carried"] = _carried(stop, found, before, here)
        stop["ranks"] = stop["ranks"][:_RANKS]
        before = here or before
    return {"communication": bool(found)}


def _own_microbatch(stop: dict[str, Any], size: int, dp: int) -> None:
    """Which microbatch of which data-parallel rank holds a stop's samples in this run."""
    first = stop.pop("samples_from")
    stop["dp"] = None
    if stop["microbatch"] is not None and first is not None and not math.isnan(first):
        stop["microbatch"] = int(first) // (size * dp)
        stop["dp"] = int(first) // size % dp


def _held(stop: dict[str, Any], view: View) -> list[list[Any]]:
    """[rank, norm, shard, non-finite] of every rank that holds it."""
    rows = view.ask(
        """select rank, sqrt(sumsq), shard, n_nan + n_posinf + n_neginf, dp from run_rows where step = ? and kind = ?
            and name = ? and io = ? and path = ? and phase = ? and microbatch is not distinct from ? order by rank""",
        [stop[name] for name in ("step", "kind", "name", "io", "path", "phase", "microbatch")],
    )
    own = [row for row in rows if stop["dp"] is None or row[4] == stop["dp"]] or rows
    return [[rank, short(norm), shard or "", int(bad or 0)] for rank, norm, shard, bad, _ in own]


def _carried(stop: dict[str, Any], found: list[Exchange], before: set[int] | None, here: set[int]) -> list[str]:
    """The collectives of its module and the messages that brought it to other ranks; or that they are missing."""
    same = [x for x in found if x.microbatch == stop["microbatch"] and x.phase == stop["phase"] and here & {*x.ranks}]
    own = [x for x in same if x.module == stop["name"]] if stop["io"] == "output" else []
    if before is not None and here and not here & before:
        own += [x for x in same if x.op == "send" and x.ranks[0] in before and x.ranks[1] in here]
    if own or not stop["first"] or stop["io"] != "output":
        return [f"carried by {_words(x)}" for x in own[:_CARRIED]]
    place = _LAYER.sub("layers.*", stop["name"])
    alike = [x for x in same if x.op != "send" and _LAYER.sub("layers.*", x.module) == place]
    return [f"no communication here, though in other layers it ends in {_words(x)}" for x in alike[:1]]


def _words(exchange: Exchange) -> str:
    who = (
        f"rank {exchange.ranks[0]} to rank {exchange.ranks[1]}"
        if exchange.op == "send"
        else f"over {exchange.group}, ranks {', '.join(map(str, exchange.ranks[:8]))}"
    )
    wrong = f": {exchange.finding}" if exchange.finding else ", arrived as sent" if exchange.op == "send" else ""
    return f"{exchange.op} {who}, {exchange.bytes / 1024:.1f} KiB{wrong}"


def _together(row: dict[str, Any], first: dict[str, Any]) -> bool:
    """Tensors of the same microbatch and direction: what the first divergence was computed from."""
    # What one side alone has, and what cannot be merged, leads nowhere.
    return (row["state"] not in ("layout", "only_left", "only_right") or row is first) and all(
        row[name] == first[name] or _both_nan(row[name], first[name]) for name in ("microbatch", "kind")
    )


def _both_nan(left: Any, right: Any) -> bool:
    return isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)


def _is(row: dict[str, Any], first: Difference) -> bool:
    same = all(row[name] == getattr(first, name) for name in ("step", "name", "io", "path", "kind", "phase"))
    whole = row["microbatch"] is None or _both_nan(row["microbatch"], math.nan)
    return same and (whole if first.microbatch is None else row["microbatch"] == first.microbatch)


def _entry(row: dict[str, Any], *, first: bool) -> dict[str, Any]:
    sides = {
        side: {
            "norm": _norm(row[f"sumsq_{side}"]),
            "min": short(row[f"min_{side}"]),
            "max": short(row[f"max_{side}"]),
            "bad": _count(row, side),
        }
        for side in ("golden", "run")
    }
    words = {name: row[name] for name in ("kind", "name", "io", "path", "phase", "op", "state")}
    key = f"{row['kind']}|{row['name']}|{row['io']}|{row['path']}|{row['phase']}"
    return {
        **words,
        **sides,
        "key": key,
        "step": int(row["step"]),
        "microbatch": None if _both_nan(row["microbatch"], math.nan) else row["microbatch"],
        "samples_from": row["samples_from"],
        "error": short(row["error"]),
        "tolerance": short(row["tolerance"]),
        "first": first,
    }


def _norm(sumsq: float | None) -> float | None:
    return short(math.sqrt(sumsq)) if sumsq is not None and sumsq >= 0 else None


def _count(row: dict[str, Any], side: str) -> int:
    values = [row[f"{name}_{side}"] for name in ("n_nan", "n_posinf", "n_neginf")]
    return sum(int(value) for value in values if value is not None and not math.isnan(value))
