"""Where a difference sits: the ranks that hold the differing tensor, and its module's place in the source.

Merged tensors have no rank any more. For the few that are shown, the rows of the ranks are read again: if both runs
have one layout, rank by rank against the golden run; if replicas differ, those further from the golden run.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.match import Pairs, same_layout
from msprobe_megatron.analyse.merge import layout_of

_WHAT = ("step", "phase", "kind", "name", "io", "path")
_FIGURES = ("numel", "min", "max", "sum", "sumsq", "n_nan", "n_posinf", "n_neginf")
_AXES = ("tp", "pp", "dp", "cp", "ep", "etp")


class _Sighting(NamedTuple):
    rank: int
    microbatch: int | None
    shard: str
    place: dict[str, int]
    figures: tuple[float, ...]


class RankFinder:
    """The ranks' own rows of a few tensors, read once.

    Example::

        finder = RankFinder(golden, run, pairs, [17, 42])
        finder.ranks(17, replica=False, tolerance=1e-5)
    """

    def __init__(self, golden: Run | None, run: Run, pairs: Pairs, chosen: Sequence[int]) -> None:
        self._run, self._pairs = run, pairs
        self._alone = golden is None
        self._rows = _read(run, pairs, chosen)
        self._golden = _read(golden, pairs, chosen) if golden is not None and same_layout(golden, run) else None
        self._sites: dict[tuple[int, str], dict[str, Any] | None] = {}

    def ranks(self, i: int, *, replica: bool, tolerance: float) -> list[int]:
        """Ranks of the run that hold tensor `i`, narrowed to those that are wrong where that can be told."""
        rows = self._of(self._rows, i, self._run)
        if self._golden is not None:
            before = {(row.rank, row.microbatch): row for row in self._of(self._golden, i, self._run)}
            wrong = {
                row.rank
                for row in rows
                if (old := before.get((row.rank, row.microbatch))) is None
                or apart(row.figures, old.figures) > tolerance
            }
            if wrong:
                return sorted(wrong)
        if replica:
            return self._odd_replicas(rows, i, tolerance)
        return sorted({row.rank for row in rows})

    def non_finite(self, i: int) -> list[int]:
        """Ranks on which tensor `i` holds NaN or infinities."""
        rows = self._of(self._rows, i, self._run)
        return sorted({row.rank for row in rows if sum(row.figures[-3:]) > 0})

    def site(self, i: int) -> dict[str, Any] | None:
        """Class and call stack of the module of tensor `i`, from any rank that has it; None for a weight."""
        step, name = int(self._pairs["step"][i]), str(self._pairs["name"][i])
        if (step, name) not in self._sites:
            ranks = sorted({row.rank for row in self._rows.get(_key(self._pairs, i), ())})
            self._sites[step, name] = _site(self._run, step, name, ranks)
        return self._sites[step, name]

    def _of(self, rows: dict[tuple[Any, ...], list[_Sighting]], i: int, run: Run) -> list[_Sighting]:
        """Rows of tensor `i`: its name, and only the microbatches that hold its samples."""
        key = _key(self._pairs, i)
        found = rows.get(key, [])
        if not found and key[1] == "recompute":
            found = rows.get((key[0], "forward", *key[2:]), [])
        if np.isnan(float(self._pairs["microbatch"][i])):
            return found
        first = int(self._pairs["block"][i] * self._pairs["unit"][i])
        last = first + int(self._pairs["unit"][i])
        dp = run.sizes.get("dp", 1)
        size = int(run.facts.get("arguments", {}).get("micro_batch_size") or 1)
        own = self._pairs["tokens"][i] == "samples"
        return [
            row
            for row in found
            if row.microbatch is not None
            and first <= ((row.microbatch * dp + row.place["dp"]) if own else row.microbatch * dp) * size < last
        ]

    def _odd_replicas(self, rows: list[_Sighting], i: int, tolerance: float) -> list[int]:
        groups: dict[tuple[Any, ...], list[_Sighting]] = defaultdict(list)
        for row in rows:
            cut = layout_of(row.shard, self._run.sizes).cut
            part = tuple(row.place[axis] if axis in cut else -1 for axis in _AXES)
            groups[row.microbatch, part].append(row)
        golden = tuple(float(np.nan_to_num(self._pairs[f"{name}_l"][i])) for name in _FIGURES)
        odd: set[int] = set()
        for group in groups.values():
            if max(apart(row.figures, group[0].figures) for row in group) <= tolerance:
                continue
            whole = group[0].figures[0] == golden[0] and not self._alone
            wrong = {row.rank for row in group if apart(row.figures, golden) > tolerance} if whole else set()
            odd |= wrong or _minority(group)
        return sorted(odd or {row.rank for row in rows})


def _minority(group: list[_Sighting]) -> set[int]:
    """Ranks that differ from what most of them hold; all of them where there is no majority."""
    by_figures: dict[tuple[float, ...], set[int]] = defaultdict(set)
    for row in group:
        by_figures[row.figures].add(row.rank)
    largest = max(by_figures.values(), key=len)
    everyone = {row.rank for row in group}
    return everyone - largest if 2 * len(largest) > len(everyone) else everyone


def apart(left: Iterable[float], right: Iterable[float]) -> float:
    """Relative distance of the figures of two sightings of one part."""
    a, b = dict(zip(_FIGURES, left, strict=True)), dict(zip(_FIGURES, right, strict=True))
    if any(a[name] != b[name] for name in ("numel", "n_nan", "n_posinf", "n_neginf")):
        return float("inf")
    norm = math.sqrt(max(a["sumsq"], b["sumsq"])) or 1e-300
    largest = max(abs(x[name]) for x in (a, b) for name in ("min", "max")) or 1e-300
    return max(
        abs(math.sqrt(a["sumsq"]) - math.sqrt(b["sumsq"])) / norm,
        abs(a["sum"] - b["sum"]) / (norm * math.sqrt(max(a["numel"], 1))),
        # As in `tolerance`: a single element may be off by more than an average.
        abs(a["min"] - b["min"]) / (2 * largest),
        abs(a["max"] - b["max"]) / (2 * largest),
    )


def _key(pairs: Pairs, i: int) -> tuple[Any, ...]:
    return (int(pairs["step"][i]), *(str(pairs[name][i]) for name in _WHAT[1:]))


def _read(run: Run, pairs: Pairs, chosen: Sequence[int]) -> dict[tuple[Any, ...], list[_Sighting]]:
    wanted = {_key(pairs, i) for i in chosen}
    steps = sorted({key[0] for key in wanted})
    names = ", ".join("'" + name.replace("'", "''") + "'" for name in sorted({key[3] for key in wanted}))
    found: dict[tuple[Any, ...], list[_Sighting]] = defaultdict(list)
    columns = ", ".join((*_WHAT, "rank", "microbatch", "shard", *_AXES, *_FIGURES))
    for step in steps:
        rows = run.rows(step=step).filter(f"name in ({names})").project(columns).fetchall()
        for row in rows:
            what, rest = row[:6], row[6:]
            figures = tuple(0.0 if value is None else float(value) for value in rest[9:])
            place = {axis: int(value) for axis, value in zip(_AXES, rest[3:9], strict=True)}
            found[what].append(_Sighting(rest[0], rest[1], rest[2], place, figures))
    return found


def _site(run: Run, step: int, name: str, ranks: Sequence[int]) -> dict[str, Any] | None:
    for rank in ranks[:1]:
        path = run.path / f"step_{step:06d}" / f"rank_{rank:05d}" / "sites.json"
        try:
            for module in json.loads(path.read_text(encoding="utf-8"))["modules"]:
                if module.get("name") == name:
                    stack = [str(frame) for frame in module.get("stack", [])]
                    return {"class": str(module.get("class", "")), "stack": stack}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
    return None
