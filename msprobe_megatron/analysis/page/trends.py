"""Trends and heat maps: every tensor by step, layers by step, ranks by step, within a budget that keeps the page small.

A series belongs to one (kind, name, io, path, phase), microbatches merged. Where a run has more than the page can hold,
steps are thinned first and deep modules dropped next; notes on the page say what was left out.

The ranks: coordinates and state of each, replicas that disagree, shards by rank, communication.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from msprobe_megatron.analysis.compare.merge import merge_plan
from msprobe_megatron.analysis.compare.verdict.tolerance import EPS
from msprobe_megatron.analysis.diagnose.exchanges import MatchedExchange, exchanges, totals
from msprobe_megatron.analysis.diagnose.throughput import by_rank
from msprobe_megatron.analysis.load.loss_units import log_losses
from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.analysis.page.table import RunView, packed, short
from msprobe_megatron.topology.layers import layer_of

CELLS = 150_000
"""Maximum of (series, step) pairs on a page; each costs about 40 bytes."""
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


def series(view: RunView, important: set[int] | None = None, cells: int = CELLS) -> dict[str, Any]:
    """All series: `steps`, `tensors` (one entry per series) and `notes` of what was left out.

    Statistics are lists over `steps`, or one value where all are equal. `important` steps are never thinned out.
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


def losses(view: RunView) -> dict[str, Any]:
    """Loss of every step by its name, in the units of Megatron's log, and the norm of all reduced gradients."""
    found: dict[str, Any] = {"steps": view.run.steps, "losses": {}, "gradient_norm": None}
    place = {step: i for i, step in enumerate(view.run.steps)}
    for name, points in log_losses(view.connection, "run_rows").items():
        line = found["losses"].setdefault(name, [None] * len(place))
        for step, value in points:
            line[place[step]] = short(value)
    rows = view.ask(
        """select step, sqrt(sum(sumsq)), sum(n_nan + n_posinf + n_neginf) from whole
        where kind = 'grad_reduced' and reason = '' group by step"""
    )
    if rows:
        found["gradient_norm"] = [None] * len(place)
        for step, value, bad in rows:
            found["gradient_norm"][place[step]] = None if bad else short(value)
    return found


STEPS = 200
RANKS = 128
LAYERS = 256

_STATISTICS = """sqrt(sum(sumsq)), max(absmax), sum(n_zero) / nullif(sum(numel), 0),
    coalesce(sum(n_nan + n_posinf + n_neginf), 0)"""
# Token ids and masks would dominate the activations.
_FLOATING = "(dtype like 'float%' or dtype like 'bfloat%' or dtype like 'complex%')"
_PLACE = r"""case when regexp_matches(name, '(^|\.)layers\.\d+(\.|$)')
    then 'layer ' || regexp_extract(name, '(?:^|\.)layers\.(\d+)', 1) else split_part(name, '.', 1) end"""


def heat_maps(view: RunView, important: set[int] | None = None) -> dict[str, Any]:
    """Both maps: `steps`, and for `layers` and `ranks` the row names and, by kind, four statistics by row and step."""
    steps = thinned(view.run.steps, STEPS, important or set())
    chosen = ", ".join(map(str, steps)) or "-1"
    layers = view.ask(
        f"""select {_PLACE} as place, kind, step, {_STATISTICS}, min(seq) from whole
        where kind <> 'loss' and {_FLOATING} and reason = '' and step in ({chosen}) group by place, kind, step"""  # noqa: S608
    )
    ranks = view.ask(
        f"""select rank, kind, step, {_STATISTICS} from run_rows
        where kind <> 'loss' and {_FLOATING} and step in ({chosen}) group by rank, kind, step"""  # noqa: S608
    )
    notes = []
    if len(steps) < len(view.run.steps):
        notes.append(f"Heat maps show {len(steps)} of {len(view.run.steps)} recorded steps.")
    places = sorted({row[0] for row in layers}, key=place_order)
    names = sorted({row[0] for row in ranks})
    if len(places) > LAYERS:
        notes.append(f"The heat map by layer shows {LAYERS} of {len(places)} places.")
    if len(names) > RANKS:
        bad = {row[0] for row in ranks if row[6]}
        names = sorted(sorted(names, key=lambda rank: (rank not in bad, rank))[:RANKS])
        notes.append(f"The heat map by rank shows {RANKS} ranks: those with non-finite values first.")
    return {
        "steps": steps,
        "layers": _map(places[:LAYERS], steps, [row[:7] for row in layers]),
        "ranks": _map(names, steps, ranks),
        "notes": notes,
    }


def place_of(name: str) -> str:
    """The row of the map that a name belongs to.

    Example::

        >>> place_of("decoder.layers.3.mlp"), place_of("output_layer")
        ('layer 3', 'output_layer')
    """
    layer = layer_of(name)
    return name.partition(".")[0] if layer is None else f"layer {layer}"


def place_order(place: str) -> tuple[int, int, str]:
    """Order of execution: the data and the embedding, the layers, the output."""
    if place.startswith("layer "):
        return 1, int(place[6:]), ""
    return (0 if place.startswith(("model", "embedding", "rotary")) else 2), 0, place


def _map(names: list[Any], steps: list[int], rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    line, column = ({key: i for i, key in enumerate(keys)} for keys in (names, steps))
    kinds: dict[str, dict[str, list[Any]]] = {}
    for name, kind, step, *figures in rows:
        if name not in line:
            continue
        tables = kinds.setdefault(
            kind, {f: [[None] * len(steps) for _ in names] for f in ("norm", "absmax", "zeros", "bad")}
        )
        for figure, value in zip(("norm", "absmax", "zeros", "bad"), figures, strict=True):
            tables[figure][line[name]][column[step]] = int(value) if figure == "bad" else short(value)
    for tables in kinds.values():
        for figure, table in tables.items():
            tables[figure] = [packed(values) for values in table]
    return {"names": names, "kinds": kinds}


RANKS = 1024
_FIRST = 40
_AXES = ("tp", "pp", "dp", "cp", "ep", "etp")
_EXACT = 1e-6
_MUST_BE_EQUAL = ("parameter", "grad_reduced", "grad_clipped", "optimizer_state", "update")


def rank_grid(view: RunView) -> list[dict[str, Any]]:
    """Every rank: coordinates, layers, time, memory, amounts written and faults; at most 1,024 of them."""
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


def disagreements(view: RunView) -> dict[str, Any]:
    """Tensors that differ between replicas, earliest first, with the ranks of each value.

    Weights and reduced gradients must be equal; activations may differ by their dtype's rounding.
    """
    rows = view.ask(
        """select step, kind, name, io, path, phase, microbatch, samples_from, greatest(d_norm, d_extreme) as apart,
            sqrt(sumsq), dtype, d_counts, d_digest from whole
        where not replicas_agree and kind <> 'loss'
        order by step, case when kind = 'parameter' then 0 when microbatch is not null then 1 else 2 end,
            samples_from, seq"""
    )
    real = [row for row in rows if _exceeds_rounding(*row[8:13], kind=row[1])]
    names = {(row[1], row[2]) for row in real}
    return {
        "total": len(real),
        "names": len(names),
        "steps": sorted({row[0] for row in real}),
        "first": [_groups(view, row) for row in _first_of_series(real)],
    }


def _exceeds_rounding(apart: float, norm: float | None, dtype: str, counts: int, digest: bool, *, kind: str) -> bool:
    allowed = _EXACT if kind in _MUST_BE_EQUAL else max(_EXACT, 4 * EPS.get(dtype, 0.0))
    return bool(counts or (digest and kind in _MUST_BE_EQUAL) or (apart or 0.0) > allowed * (norm or 1e-300))


def _first_of_series(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    first: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for row in rows:
        first.setdefault(row[1:6], row)
    return list(first.values())[:_FIRST]


def _groups(view: RunView, row: tuple[Any, ...]) -> dict[str, Any]:
    step, kind, name, io, path, phase, microbatch = row[:7]
    rows = view.ask(
        f"""select rank, shard, sqrt(sumsq), sum, min, max, n_nan + n_posinf + n_neginf, {", ".join(_AXES)}
        from run_rows where step = ? and kind = ? and name = ? and io = ? and path = ? and phase = ?
            and microbatch is not distinct from ? order by rank""",  # noqa: S608
        [step, kind, name, io, path, phase, microbatch],
    )
    parts: dict[tuple[Any, ...], dict[tuple[Any, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, shard, norm, total, low, high, bad, *place in rows:
        plan = merge_plan(shard or "", view.run.sizes)
        if plan.tokens == "samples":
            plan = replace(plan, cut=plan.cut | {"dp"})  # other data-parallel ranks hold other samples
        parts[plan.part(dict(zip(_AXES, place, strict=True)))][norm, total, low, high, bad].append(rank)
    groups = [
        {"ranks": ranks, "norm": short(values[0]), "min": short(values[2]), "max": short(values[3]), "bad": values[4]}
        for held in parts.values()
        if len(held) > 1
        for values, ranks in held.items()
    ]
    key = f"{kind}|{name}|{io}|{path}|{phase}"
    return {"step": step, "microbatch": microbatch, "kind": kind, "name": name, "io": io, "key": key, "groups": groups}


ROWS = 40_000
"""Maximum of rows of ranks on a page."""
_STEPS = 3


def shards(view: RunView, important: list[int], rows: int = ROWS) -> dict[str, Any]:
    """Rows of ranks, by series, for at most three steps: the important ones, then the last, then the first.

    An entry of `rows` is [step, rank, norm, min, max, mean, zeros, non-finite, shape, shard], the last two as
    numbers into `texts`.
    """
    wanted = dict.fromkeys([*important, *view.run.steps[-1:], *view.run.steps[:1]])
    steps = sorted([step for step in wanted if step in view.run.steps][:_STEPS])
    if not steps:
        return {"steps": [], "notes": [], "rows": {}, "texts": []}
    chosen = ", ".join(map(str, steps))
    (total,) = view.ask(
        f"select count(distinct (kind, name, io, path, phase, step, rank)) from run_rows where step in ({chosen})"  # noqa: S608
    )[0]
    ranks = sorted({rank for step, rank, _ in view.run.files if step in steps})
    notes = []
    if total > rows:
        keep = max(2, int(len(ranks) * rows / total))
        bad = {
            row[0]
            for row in view.ask(
                f"select distinct rank from run_rows where n_nan + n_posinf + n_neginf > 0 and step in ({chosen})"  # noqa: S608
            )
        }
        notes.append(f"Shards show {keep} of {len(ranks)} ranks: those with non-finite values first.")
        ranks = sorted(sorted(ranks, key=lambda rank: (rank not in bad, rank))[:keep])
    notes.append(f"Shards are shown for steps {', '.join(map(str, steps))}.")
    return {"steps": steps, "notes": notes, **_rows(view, chosen, ", ".join(map(str, ranks)))}


def _rows(view: RunView, steps: str, ranks: str) -> dict[str, Any]:
    texts: dict[str, int] = {}
    found: dict[str, list[Any]] = {}
    query = f"""
        select kind || '|' || name || '|' || io || '|' || path || '|' || phase, step, rank, sqrt(sum(sumsq)), min(min),
            max(max), sum(sum) / nullif(sum(numel) - sum(n_nan + n_posinf + n_neginf), 0),
            sum(n_zero) / nullif(sum(numel), 0), coalesce(sum(n_nan + n_posinf + n_neginf), 0),
            any_value(cast(shape as varchar)), any_value(shard)
        from run_rows where step in ({steps}) and rank in ({ranks})
        group by kind, name, io, path, phase, step, rank order by all"""  # noqa: S608
    for key, step, rank, norm, low, high, mean, zeros, bad, shape, shard in view.ask(query):
        figures = [short(value) for value in (norm, low, high, mean, zeros)]
        words = [texts.setdefault(text or "", len(texts)) for text in (shape, shard)]
        found.setdefault(key, []).append([step, rank, *figures, int(bad), *words])
    return {"rows": found, "texts": list(texts)}


_SHOWN = 300


def communication(run: Run, steps: list[int]) -> dict[str, Any]:
    """Exchanges of the first of `steps` that has any, inconsistent ones first; empty if none were recorded."""
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


def _plain(exchange: MatchedExchange) -> dict[str, Any]:
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
