"""What each rank holds of every tensor, in the few steps that are looked at closely."""

from __future__ import annotations

from typing import Any

from msprobe_megatron.analyse.view_table import View, short

ROWS = 40_000
"""Most rows of ranks that a page carries."""
_STEPS = 3


def shards(view: View, important: list[int], rows: int = ROWS) -> dict[str, Any]:
    """Rows of ranks, by series, for at most three steps: the important ones, then the last, then the first.

    An entry of `rows` is [step, rank, norm, min, max, mean, zeros, non-finite, shape, shard], the last two as
    numbers into `texts`.

    Example::

        shards(view, [7])["rows"]["activation|decoder|output||forward"]
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


def _rows(view: View, steps: str, ranks: str) -> dict[str, Any]:
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
