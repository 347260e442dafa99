"""Differences: the few pairs that are shown, in full: tensor, error, ranks, place in the source.

Merged tensors have no rank. For the few that are shown, the rows of the ranks are read again: if both runs have the
same layout, rank by rank beside the golden run; if replicas differ, those further from the golden run are named.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from msprobe_megatron.analysis.compare.match import Pair, Pairs, same_layout
from msprobe_megatron.analysis.compare.merge import merge_plan
from msprobe_megatron.analysis.compare.verdict.causes import culprit, doubled_layers
from msprobe_megatron.analysis.compare.verdict.judge import Judgement
from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.topology.layers import layer_of

if TYPE_CHECKING:
    from msprobe_megatron.analysis.compare.pairs.tensor_pairs import ElementResults


@dataclass(frozen=True)
class Difference:
    """One tensor that differs. `microbatch` counts as the golden run does; `samples` are [first, last + 1).

    `module` is where to look: the module itself if this is its result, the enclosing one if it is an input.
    """

    module: str
    name: str
    io: str
    path: str
    kind: str
    step: int
    microbatch: int | None
    samples: tuple[int, int] | None
    phase: str
    layer: int | None
    ranks: list[int]
    site: dict[str, Any] | None
    error: float
    tolerance: float
    state: str
    what: str
    elements: dict[str, Any] | None = None
    """For tensors that both runs saved: relative_l2, max_abs, cosine, differing, numel, largest_at, first_at."""


def each_once(pairs: Pairs, found: list[int]) -> list[int]:
    """The first pair of each tensor: every microbatch shows the same fault."""
    seen: dict[tuple[str, ...], int] = {}
    for i in found:
        seen.setdefault(tuple(str(pairs[name][i]) for name in ("kind", "name", "io", "path")), i)
    return list(seen.values())


def difference(
    run: Run, finder: RankFinder, pairs: Pairs, judgement: Judgement, states: Sequence[str], i: int
) -> Difference:
    """Pair `i` as a `Difference`."""
    name, whole_step = str(pairs["name"][i]), bool(np.isnan(float(pairs["microbatch"][i])))
    first = int(pairs["block"][i] * pairs["unit"][i])
    return Difference(
        module=culprit(str(pairs["kind"][i]), name, str(pairs["io"][i])),
        name=name,
        io=str(pairs["io"][i]),
        path=str(pairs["path"][i]),
        kind=str(pairs["kind"][i]),
        step=int(pairs["step"][i]),
        microbatch=None if whole_step else int(pairs["microbatch"][i]),
        samples=None if whole_step else (first, first + int(pairs["unit"][i])),
        phase=str(pairs["phase"][i]),
        layer=layer_of(name),
        ranks=judgement.ranks.get(i)
        or finder.ranks(i, replica=bool(judgement.replica[i]), tolerance=float(judgement.tolerance[i]))
        or sorted({rank for holders in doubled_layers(run).values() for rank, _ in holders}),
        site=finder.site(i),
        error=float(judgement.error[i]),
        tolerance=float(judgement.tolerance[i]),
        state=states[i],
        what=judgement.found.get(i) or describe(pairs, judgement, i),
        elements=_elements(pairs, judgement, i),
    )


def _elements(pairs: Pairs, judgement: Judgement, i: int) -> dict[str, Any] | None:
    """Results of saved tensors; `first_at` is the first element beyond the tolerance, else the first that differs."""
    found = _element_results(pairs, i)
    if found is None or pairs.tensors is None:
        return None
    limit = float(judgement.tolerance[i] * np.nan_to_num(pairs.both("absmax").left[i]))
    first = pairs.tensors.first(i, limit) or pairs.tensors.first(i, 0.0)
    return {
        "relative_l2": found.relative if math.isfinite(found.relative) else None,
        "max_abs": found.largest,
        "cosine": found.cosine,
        "differing": found.differing + found.unlike,
        "numel": found.numel,
        "largest_at": found.largest_at,
        "first_at": first,
    }


def describe(pairs: Pairs, judgement: Judgement, i: int) -> str:
    """The statistic with the largest error, golden run first."""
    if pairs["left_has"][i] != pairs["right_has"][i]:
        return f"recorded only by the {'golden run' if pairs['left_has'][i] else 'second run'}"
    if judgement.replica[i]:
        return "ranks that should hold identical values differ"
    non_finite = [sum(values) for values in zip(*(_values(pairs, name, i) for name in _NON_FINITE), strict=True)]
    if non_finite[0] != non_finite[1]:
        return f"{non_finite[0]:.0f} non-finite elements vs {non_finite[1]:.0f}"
    statistic = _worst_statistic(pairs, i)
    found = _element_results(pairs, i)
    if found is not None and found.differing:
        return (
            f"{found.differing} of {found.numel} elements differ, relative L2 error {found.relative:.2g}"
            f" (cosine {found.cosine:.6g}), largest difference at {list(found.largest_at or ())}; {statistic}"
        )
    if judgement.element[i]:
        return f"element-wise relative L2 error {judgement.error[i]:.2g}; {statistic}"
    return statistic


def _worst_statistic(pairs: Pairs, i: int) -> str:
    """Norm, sum, minimum or maximum: the one with the largest error in the units of the tolerance."""
    values = {name: _values(pairs, name, i) for name in ("sumsq", "sum", "min", "max", "absmax", "numel")}
    values["norm"] = norms = values["sumsq"].map(math.sqrt)
    size, largest = max(*norms, 1e-300), max(*values["absmax"], 1e-300)
    units = {"norm": size, "sum": size * math.sqrt(max(*values["numel"], 1)), "min": 2 * largest, "max": 2 * largest}
    name = max(units, key=lambda name: abs(values[name].left - values[name].right) / units[name])
    return f"{name} {values[name].left:.6g} vs {values[name].right:.6g}"


def _values(pairs: Pairs, name: str, i: int) -> Pair[float]:
    return pairs.both(name).map(lambda column: float(np.nan_to_num(column[i])))


def _element_results(pairs: Pairs, i: int) -> ElementResults | None:
    return pairs.tensors.results.get(i) if pairs.tensors is not None else None


def replicas(finder: RankFinder, pairs: Pairs, judgement: Judgement, unequal: Sequence[int]) -> list[dict[str, Any]]:
    """Tensors that differ between ranks that should hold identical values, in causal order."""
    return [
        {
            "name": str(pairs["name"][i]),
            "io": str(pairs["io"][i]),
            "kind": str(pairs["kind"][i]),
            "step": int(pairs["step"][i]),
            "ranks": finder.ranks(i, replica=True, tolerance=float(judgement.tolerance[i])),
        }
        for i in unequal
    ]


def data_differ(pairs: Pairs, judgement: Judgement, i: int) -> str:
    """The reason to give when the first difference is in the batch."""
    return (
        f"the DATA differ: {pairs['path'][i]} of the model at step {pairs['step'][i]},"
        f" microbatch {int(pairs['microbatch'][i])} ({describe(pairs, judgement, i)});"
        " give both runs the same samples in the same order"
    )


_KEY = ("step", "phase", "kind", "name", "io", "path")
_NON_FINITE = ("n_nan", "n_posinf", "n_neginf")
_STATISTICS = ("numel", "min", "max", "sum", "sumsq", "n_nan", "n_posinf", "n_neginf")
_AXES = ("tp", "pp", "dp", "cp", "ep", "etp")


class _RankRow(NamedTuple):
    rank: int
    microbatch: int | None
    shard: str
    place: dict[str, int]
    statistics: tuple[float, ...]


class RankFinder:
    """The rows of every rank of a few tensors, read once."""

    def __init__(self, golden: Run | None, run: Run, pairs: Pairs, chosen: Sequence[int]) -> None:
        self._run, self._pairs = run, pairs
        self._alone = golden is None
        self._rows = _read(run, pairs, chosen)
        self._golden = _read(golden, pairs, chosen) if golden is not None and same_layout(golden, run) else None
        self._sites: dict[tuple[int, str], dict[str, Any] | None] = {}

    def ranks(self, i: int, *, replica: bool, tolerance: float) -> list[int]:
        """Ranks of the run that hold tensor `i`, narrowed to the wrong ones where they can be identified."""
        rows = self._of(self._rows, i, self._run)
        if self._golden is not None:
            before = {(row.rank, row.microbatch): row for row in self._of(self._golden, i, self._run)}
            wrong = {
                row.rank
                for row in rows
                if (old := before.get((row.rank, row.microbatch))) is None
                or relative_error(row.statistics, old.statistics) > tolerance
            }
            if wrong:
                return sorted(wrong)
        if replica:
            return self._wrong_replicas(rows, i, tolerance)
        return sorted({row.rank for row in rows})

    def non_finite(self, i: int) -> list[int]:
        """Ranks on which tensor `i` holds NaN or infinities."""
        rows = self._of(self._rows, i, self._run)
        return sorted({row.rank for row in rows if sum(row.statistics[-3:]) > 0})

    def site(self, i: int) -> dict[str, Any] | None:
        """Class and call stack of the module of tensor `i`, from any rank that has it; None for a weight."""
        step, name = int(self._pairs["step"][i]), str(self._pairs["name"][i])
        if (step, name) not in self._sites:
            ranks = sorted({row.rank for row in self._rows.get(_key(self._pairs, i), ())})
            self._sites[step, name] = _site(self._run, step, name, ranks)
        return self._sites[step, name]

    def _of(self, rows: dict[tuple[Any, ...], list[_RankRow]], i: int, run: Run) -> list[_RankRow]:
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

    def _wrong_replicas(self, rows: list[_RankRow], i: int, tolerance: float) -> list[int]:
        groups: dict[tuple[Any, ...], list[_RankRow]] = defaultdict(list)
        for row in rows:
            groups[row.microbatch, merge_plan(row.shard, self._run.sizes).part(row.place)].append(row)
        golden = tuple(_values(self._pairs, name, i).left for name in _STATISTICS)
        found: set[int] = set()
        for group in groups.values():
            if max(relative_error(row.statistics, group[0].statistics) for row in group) <= tolerance:
                continue
            found |= self._unlike_golden(group, golden, tolerance) or _minority(group)
        return sorted(found or {row.rank for row in rows})

    def _unlike_golden(self, group: list[_RankRow], golden: tuple[float, ...], tolerance: float) -> set[int]:
        """Replicas that differ from the golden tensor; none if there is no golden run or they hold only a part."""
        if self._alone or group[0].statistics[0] != golden[0]:
            return set()
        return {row.rank for row in group if relative_error(row.statistics, golden) > tolerance}


def _minority(group: list[_RankRow]) -> set[int]:
    """Ranks that differ from the majority; all of them where there is none."""
    by_statistics: dict[tuple[float, ...], set[int]] = defaultdict(set)
    for row in group:
        by_statistics[row.statistics].add(row.rank)
    largest = max(by_statistics.values(), key=len)
    everyone = {row.rank for row in group}
    return everyone - largest if 2 * len(largest) > len(everyone) else everyone


def relative_error(left: Iterable[float], right: Iterable[float]) -> float:
    """Relative error between the statistics of two ranks that hold the same part."""
    a, b = dict(zip(_STATISTICS, left, strict=True)), dict(zip(_STATISTICS, right, strict=True))
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
    return (int(pairs["step"][i]), *(str(pairs[name][i]) for name in _KEY[1:]))


def _read(run: Run, pairs: Pairs, chosen: Sequence[int]) -> dict[tuple[Any, ...], list[_RankRow]]:
    wanted = {_key(pairs, i) for i in chosen}
    steps = sorted({key[0] for key in wanted})
    names = ", ".join("'" + name.replace("'", "''") + "'" for name in sorted({key[3] for key in wanted}))
    found: dict[tuple[Any, ...], list[_RankRow]] = defaultdict(list)
    columns = ", ".join((*_KEY, "rank", "microbatch", "shard", *_AXES, *_STATISTICS))
    for step in steps:
        rows = run.rows(step=step).filter(f"name in ({names})").project(columns).fetchall()
        for row in rows:
            key, rest = row[:6], row[6:]
            statistics = tuple(0.0 if value is None else float(value) for value in rest[9:])
            place = {axis: int(value) for axis, value in zip(_AXES, rest[3:9], strict=True)}
            found[key].append(_RankRow(rest[0], rest[1], rest[2], place, statistics))
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
