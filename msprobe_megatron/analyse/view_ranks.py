"""Who: every rank with its coordinates, layers and ledger, and the replicas that do not agree with each other."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from msprobe_megatron.analyse.merge import layout_of
from msprobe_megatron.analyse.throughput import by_rank
from msprobe_megatron.analyse.tolerance import EPS
from msprobe_megatron.analyse.view_table import View, short

RANKS = 1024
_FIRST = 40
_AXES = ("tp", "pp", "dp", "cp", "ep", "etp")
_EXACT = 1e-6
_MUST_BE_EQUAL = ("parameter", "grad_reduced", "grad_clipped", "optimizer_state", "update")


def rank_grid(view: View) -> list[dict[str, Any]]:
    """Every rank: coordinates, layers, time and memory, what it wrote and its faults; at most 1,024 of them.

    Example::

        rank_grid(view)[0]["tp"]
    """
    world = int(view.run.facts.get("world", 1))
    known = {int(entry["rank"]): entry for entry in view.run.facts.get("ranks", [])}
    bad = dict(view.ask("select rank, sum(n_nan + n_posinf + n_neginf) from run_rows group by rank"))
    speed = by_rank(view.run)
    found = []
    for rank in range(min(world, RANKS)):
        facts = view.run.ranks.get(rank, {})
        place = known.get(rank) or facts.get("coordinates", {})
        ledger = facts.get("ledger", {})
        found.append(
            {
                "rank": rank,
                **{axis: place.get(axis) for axis in (*_AXES, "edp")},
                "layers": [layer for chunk in facts.get("chunks", []) for layer in chunk.get("layers", [])],
                "rows": ledger.get("written", {}).get("rows_written", 0),
                "steps": ledger.get("written", {}).get("steps_written", 0),
                "faults": [str(text) for text in ledger.get("faults", [])],
                "closed": facts.get("closed"),
                "bad": int(bad.get(rank) or 0),
                "seconds": short(speed.get(rank, {}).get("seconds")),
                "memory": speed.get(rank, {}).get("bytes"),
            }
        )
    return found


def disagreements(view: View) -> dict[str, Any]:
    """Tensors on which ranks that should hold the same numbers do not, earliest first, with the ranks of each value.

    Weights and reduced gradients must be equal; activations may differ by their dtype's rounding.

    Example::

        disagreements(view)["first"][0]["groups"]      # [{"ranks": [0, 1], "norm": 1.5}, {"ranks": [2], "norm": 1.25}]
    """
    rows = view.ask(
        """select step, kind, name, io, path, phase, microbatch, samples_from, greatest(d_norm, d_extreme) as apart,
            sqrt(sumsq), dtype, d_counts, d_digest from whole
        where not replicas_agree and kind <> 'loss'
        order by step, case when kind = 'parameter' then 0 when microbatch is not null then 1 else 2 end,
            samples_from, seq"""
    )
    real = [row for row in rows if _matters(*row[8:13], kind=row[1])]
    names = {(row[1], row[2]) for row in real}
    return {
        "total": len(real),
        "names": len(names),
        "steps": sorted({row[0] for row in real}),
        "first": [_groups(view, row) for row in _one_a_series(real)],
    }


def _matters(apart: float, norm: float | None, dtype: str, counts: int, digest: bool, *, kind: str) -> bool:
    allowed = _EXACT if kind in _MUST_BE_EQUAL else max(_EXACT, 4 * EPS.get(dtype, 0.0))
    return bool(counts or (digest and kind in _MUST_BE_EQUAL) or (apart or 0.0) > allowed * (norm or 1e-300))


def _one_a_series(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    first: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for row in rows:
        first.setdefault(row[1:6], row)
    return list(first.values())[:_FIRST]


def _groups(view: View, row: tuple[Any, ...]) -> dict[str, Any]:
    step, kind, name, io, path, phase, microbatch = row[:7]
    rows = view.ask(
        f"""select rank, shard, sqrt(sumsq), sum, min, max, n_nan + n_posinf + n_neginf, {", ".join(_AXES)}
        from run_rows where step = ? and kind = ? and name = ? and io = ? and path = ? and phase = ?
            and microbatch is not distinct from ? order by rank""",  # noqa: S608
        [step, kind, name, io, path, phase, microbatch],
    )
    parts: dict[tuple[Any, ...], dict[tuple[Any, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, shard, norm, total, low, high, bad, *place in rows:
        layout = layout_of(shard or "", view.run.sizes)
        cut = layout.cut | ({"dp"} if layout.tokens == "samples" else set())
        part = tuple(n if axis in cut else -1 for axis, n in zip(_AXES, place, strict=True))
        parts[part][norm, total, low, high, bad].append(rank)
    groups = [
        {"ranks": ranks, "norm": short(values[0]), "min": short(values[2]), "max": short(values[3]), "bad": values[4]}
        for held in parts.values()
        if len(held) > 1
        for values, ranks in held.items()
    ]
    key = f"{kind}|{name}|{io}|{path}|{phase}"
    return {"step": step, "microbatch": microbatch, "kind": kind, "name": name, "io": io, "key": key, "groups": groups}
