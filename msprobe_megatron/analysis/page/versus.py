"""Two runs on one page: the verdict, states of all tensors, a map of the differences, settings that differ.

`flow` and `follow` show the way to the first divergence: tensors in causal order, what each rank held of them, and the
communication that transferred them. The tensors come from the comparison; the norms of ranks from the run's own rows of
the same samples, which another layout may count as another microbatch.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow.compute as pc

from msprobe_megatron.analysis.compare.compare import Comparison, Difference
from msprobe_megatron.analysis.compare.merge import micro_batch_size
from msprobe_megatron.analysis.diagnose.exchanges import MatchedExchange, exchanges
from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.analysis.page.findings import PageFinding, PageVerdict, few
from msprobe_megatron.analysis.page.table import RunView, short
from msprobe_megatron.analysis.page.trends import place_of, place_order
from msprobe_megatron.analysis.settings.env_diff import env_diff

_WORST = {"agree": 0, "layout": 1, "only_left": 2, "only_right": 2, "inherited": 3, "diverged": 4}


def states(comparison: Comparison) -> dict[str, list[Any]]:
    """Worst state of each series: [state, first step in that state, largest error, its tolerance]."""
    found: dict[str, list[Any]] = {}
    if comparison.table is None:
        return found
    names = ("kind", "name", "io", "path", "phase", "step", "state", "error", "tolerance")
    for kind, name, io, path, phase, step, state, error, tolerance in zip(
        *(comparison.table.column(column).to_pylist() for column in names), strict=True
    ):
        key = f"{kind}|{name}|{io}|{path}|{phase}"
        now = found.get(key)
        if now is None or _WORST[state] > _WORST[now[0]]:
            found[key] = [state, int(step), short(error), short(tolerance)]
        elif state == now[0] and (error or 0) > (now[2] if now[2] is not None else math.inf):
            found[key] = [state, now[1], short(error), short(tolerance)]
    return found


def difference_map(comparison: Comparison) -> dict[str, Any] | None:
    """Heat map of layers by step: the largest error in units of its tolerance, and how many tensors differ."""
    if comparison.table is None:
        return None
    cells: dict[tuple[str, str, int], list[float]] = {}
    columns = ("name", "kind", "step", "state", "error", "tolerance")
    for name, kind, step, state, error, tolerance in zip(
        *(comparison.table.column(column).to_pylist() for column in columns), strict=True
    ):
        if state not in ("agree", "diverged", "inherited") or kind == "loss":
            continue
        entry = cells.setdefault((place_of(name), kind, int(step)), [0.0, 0.0])
        excess = (error or 0.0) / tolerance if tolerance else 0.0
        entry[0] = max(entry[0], excess if math.isfinite(excess) else 0.0)
        entry[1] += state != "agree"
    places = sorted({place for place, _, _ in cells}, key=place_order)
    kinds: dict[str, dict[str, list[list[Any]]]] = {}
    for (place, kind, step), (excess, differ) in cells.items():
        tables = kinds.setdefault(
            kind, {name: [[None] * len(comparison.steps) for _ in places] for name in ("excess", "bad")}
        )
        row, column = places.index(place), comparison.steps.index(step)
        tables["excess"][row][column], tables["bad"][row][column] = short(excess), int(differ)
    return {"names": places, "kinds": kinds}


def setup_differences(golden: Run, run: Run) -> list[dict[str, Any]]:
    """Arguments, environment, versions, sources, weights and data that differ, by effect, without the kit's own."""
    return [
        {"name": entry.name, "golden": entry.left, "run": entry.right, "effect": entry.effect}
        for entry in env_diff(golden, run).settings
        if not entry.name.startswith("msprobe_")
    ]


def verdict_against(comparison: Comparison, alone: PageVerdict) -> PageVerdict:
    """The verdict on a run beside a golden one; the findings of the run alone follow."""
    # "Compare it with a golden run" is no longer useful advice.
    calm = [replace(found, command="") if found.tone == "good" else found for found in alone.findings]
    alone = replace(alone, findings=calm)
    first = comparison.first_divergence
    if comparison.verdict == "agree":
        return _agrees(comparison.counts, alone)
    if comparison.verdict == "incomparable" or first is None:
        reason = PageFinding("note", "Cannot be compared", comparison.reason)
        tone = "bad" if alone.tone == "bad" else "note"
        return PageVerdict(tone, "Cannot be compared", [reason, *alone.findings], alone.steps)
    golden, run = shlex.quote(comparison.golden), shlex.quote(comparison.run)
    finding = _divergence(first, f"msprobe-megatron compare {golden} {run} --step {first.step}")
    hints = [PageFinding("note", "Hint", text[:1].upper() + text[1:]) for text in comparison.hints]
    # The input of a layer is computed by the enclosing module, and "in decoder" would say nothing.
    where = first.module if not _is_layer_input(first) else f"the input of {first.name}"
    head = f"Diverged at step {first.step} in {where}"
    return PageVerdict("bad", head, [finding, *hints, *alone.findings], [first.step, *alone.steps])


def _agrees(counts: Mapping[str, int], alone: PageVerdict) -> PageVerdict:
    text = f"{counts.get('agree', 0):,} tensors agree within the error expected from rounding."
    if counts.get("layout"):
        text += f" {counts['layout']:,} could not be compared."
    head = "Agrees with the golden run" if alone.tone == "good" else f"Agrees with the golden run. {alone.headline}"
    return PageVerdict(alone.tone, head, [PageFinding("good", "Same computation", text), *alone.findings], alone.steps)


def _is_layer_input(first: Difference) -> bool:
    return first.module != first.name and first.name.endswith(f"layers.{first.layer}")


def _divergence(first: Difference, command: str) -> PageFinding:
    what = {"activation": first.io, "gradient": f"gradient of the {first.io}"}.get(first.kind, first.kind)
    times = first.error / first.tolerance if first.tolerance else math.inf
    over = f", {times:,.0f} times the error expected from rounding ({_error(first.tolerance)})"
    when = f"step {first.step}" + ("" if first.microbatch is None else f", microbatch {first.microbatch}")
    facts = (
        ("tensor", f"{first.name} {what} {first.path}".strip()),
        ("when", f"{when}, {first.phase}"),
        ("ranks", few(first.ranks)),
        ("golden | this run", first.what.replace(" vs ", " | ", 1)),
        ("relative error", f"{_error(first.error)}{over if math.isfinite(times) else ''}"),
    )
    around = f" Look at {first.module}, which computes it." if first.module != first.name else ""
    if _is_layer_input(first):
        around = " Check how it gets there: the previous layer, or between stages the point-to-point transfer."
    text = f"Everything before it agrees with the golden run. This is the first tensor that does not.{around}"
    key = f"{first.kind}|{first.name}|{first.io}|{first.path}|{first.phase}"
    return PageFinding("bad", "First divergence", text, command, key, first.step, facts)


def _error(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "infinite"


_BEFORE, _AFTER = 7, 6
_RANKS = 8
_TRANSFERS = 4
_LAYER = re.compile(r"layers\.\d+")


def flow(comparison: Comparison) -> list[dict[str, Any]]:
    """Tensors just before, at and after the first divergence, in causal order, with the statistics of both runs."""
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


def follow(stops: list[dict[str, Any]], view: RunView) -> dict[str, Any]:
    """Add to each stop its norms per rank and the communication that led to it; says whether that was recorded."""
    if not stops:
        return {"communication": False}
    found = exchanges(view.run, stops[0]["step"])
    size = micro_batch_size(view.run, view.connection.table("run_rows"))
    before: set[int] | None = None
    for stop in stops:
        _own_microbatch(stop, size, view.run.sizes.get("dp", 1))
        stop["ranks"] = _held(stop, view)
        here = {rank for rank, *_ in stop["ranks"]}
        stop["carried"] = _transfers(stop, found, before, here)
        stop["ranks"] = stop["ranks"][:_RANKS]
        before = here or before
    return {"communication": bool(found)}


def _own_microbatch(stop: dict[str, Any], size: int, dp: int) -> None:
    """Replace the microbatch of a stop by that of this run, and add the data-parallel rank that holds its samples."""
    first = stop.pop("samples_from")
    stop["dp"] = None
    if stop["microbatch"] is not None and first is not None and not math.isnan(first):
        stop["microbatch"] = int(first) // (size * dp)
        stop["dp"] = int(first) // size % dp


def _held(stop: dict[str, Any], view: RunView) -> list[list[Any]]:
    """[rank, norm, shard, non-finite] of every rank that holds it."""
    rows = view.ask(
        """select rank, sqrt(sumsq), shard, n_nan + n_posinf + n_neginf, dp from run_rows where step = ? and kind = ?
            and name = ? and io = ? and path = ? and phase = ? and microbatch is not distinct from ? order by rank""",
        [stop[name] for name in ("step", "kind", "name", "io", "path", "phase", "microbatch")],
    )
    own = [row for row in rows if stop["dp"] is None or row[4] == stop["dp"]] or rows
    return [[rank, short(norm), shard or "", int(bad or 0)] for rank, norm, shard, bad, _ in own]


def _transfers(
    stop: dict[str, Any], found: list[MatchedExchange], before: set[int] | None, here: set[int]
) -> list[str]:
    """The collectives of a stop's module and the messages that brought it to other ranks, or a note that none exist."""
    same = [exchange for exchange in found if _concerns(exchange, stop, here)]
    own = [exchange for exchange in same if exchange.module == stop["name"]] if stop["io"] == "output" else []
    if before is not None and here and not here & before:
        own += [x for x in same if x.op == "send" and x.ranks[0] in before and x.ranks[1] in here]
    if own or not stop["first"] or stop["io"] != "output":
        return [f"via {_exchange_text(exchange)}" for exchange in own[:_TRANSFERS]]
    return _missing_transfer(stop["name"], same)


def _concerns(exchange: MatchedExchange, stop: dict[str, Any], ranks: set[int]) -> bool:
    same_moment = exchange.microbatch == stop["microbatch"] and exchange.phase == stop["phase"]
    return same_moment and bool(ranks & {*exchange.ranks})


def _missing_transfer(name: str, found: list[MatchedExchange]) -> list[str]:
    """A collective that the same module has in other layers but not in this one."""
    place = _LAYER.sub("layers.*", name)
    alike = [x for x in found if x.op != "send" and _LAYER.sub("layers.*", x.module) == place]
    return [f"no communication here, although in other layers it ends in {_exchange_text(x)}" for x in alike[:1]]


def _exchange_text(exchange: MatchedExchange) -> str:
    if exchange.op == "send":
        who, fine = f"rank {exchange.ranks[0]} to rank {exchange.ranks[1]}", ", received as sent"
    else:
        who, fine = f"over {exchange.group}, ranks {', '.join(map(str, exchange.ranks[:8]))}", ""
    outcome = f": {exchange.finding}" if exchange.finding else fine
    return f"{exchange.op} {who}, {exchange.bytes / 1024:.1f} KiB{outcome}"


def _together(row: dict[str, Any], first: dict[str, Any]) -> bool:
    """True for tensors of the same microbatch and kind: candidates for what the first divergence was computed from."""
    # Tensors of one run only, and tensors that cannot be merged, show nothing.
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
