"""Saved tensors of two runs, compared element by element instead of by estimates.

Follows `match`. For each pair of whole tensors of which both runs saved all shards, the shards are aligned as views
(`assembly`) and read once (`elements`). Pairs without saved tensors keep the statistics of their rows.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import duckdb
import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.match import Pair, Pairs, same_layout
from msprobe_megatron.analysis.compare.merge import labelled_query
from msprobe_megatron.analysis.compare.pairs.assembly import Part, meet, part_of
from msprobe_megatron.analysis.compare.pairs.elements import Apart, Index, View, add_views, first_beyond
from msprobe_megatron.analysis.compare.pairs.expert_tokens import SAMPLE, ExpertTokens
from msprobe_megatron.analysis.load.run import Run, RunError
from msprobe_megatron.analysis.load.saved_tensors import TensorFiles
from msprobe_megatron.topology.shards import ShardSpec

Progress = Callable[[int, int], None]
"""Called with the number of pairs done and the total."""

_AXES = ("tp", "pp", "dp", "cp", "ep", "etp", "edp")
_KEY = ("step", "phase", "kind", "name", "io", "path")

_SQL_SAVED = f"""
select {", ".join(_KEY)}, samples_from, rank, tensor, shape, global_shape, shard, factor, {", ".join(_AXES)}
from (select *, row_number() over (partition by {", ".join(_KEY)}, samples_from, part order by rank) as replica
    from ({{labelled}}) where tensor is not null) where replica = 1 order by samples_from, rank
"""  # noqa: S608


class Saved(NamedTuple):
    """One saved shard: its rank, its key in the tensor files, and its place in the whole tensor."""

    samples_from: int
    rank: int
    tensor: str
    shape: Index
    whole: Index | None
    shard: str
    factor: float
    place: dict[str, int]


class ElementResults(NamedTuple):
    """Result of one pair, in the units of the golden run's tensor as it is judged."""

    relative: float
    distance: float
    largest: float
    cosine: float
    differing: int
    unlike: int
    largest_at: Index | None
    numel: int


class _Side:
    """What one run saved."""

    def __init__(self, run: Run, saved: dict[tuple[Any, ...], list[Saved]]) -> None:
        self.sizes, self.saved, self.files = run.sizes, saved, TensorFiles(run)
        self.experts = ExpertTokens(saved, self.files, run.sizes)


class TensorPairs:
    """The pairs of a comparison that both runs have saved as tensors."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        runs: Pair[Run],
        labelled: Pair[str],
        columns: dict[str, npt.NDArray[Any]],
        by_rank: bool,
    ) -> None:
        saved = labelled.map(lambda query: read_saved(connection, query))
        self._sides = Pair(_Side(runs.left, saved.left), _Side(runs.right, saved.right))
        self._columns, self._by_rank = columns, by_rank
        self._known: dict[tuple[Any, ...], ElementResults | None] = {}
        self.results: dict[int, ElementResults] = {}
        self.problems: list[str] = []

    def compare(self, progress: Progress | None = None) -> None:
        """Compare all pairs; `results` holds those that could be compared."""
        both = np.flatnonzero(self._columns["left_has"].astype(bool) & self._columns["right_has"].astype(bool))
        for count, i in enumerate(both.tolist()):
            if progress is not None and count % 64 == 0:
                progress(count, len(both))
            try:
                found = self._pair(i)
            except RunError as error:
                self.problems.append(str(error))
                continue
            if found is not None:
                self.results[i] = found

    def column(self, name: str, absent: float = math.nan) -> npt.NDArray[np.float64]:
        """One field of the results, for all pairs."""
        values = np.full(len(self._columns["step"]), absent)
        for i, found in self.results.items():
            values[i] = getattr(found, name)
        return values

    def first(self, i: int, limit: float) -> Index | None:
        """First element of pair `i`, in the order of its shards, that differs by more than `limit`."""
        if self._columns["tokens"][i] == "experts":
            return self.results[i].largest_at
        left, right = self._shards(i)
        ratio = left[0].factor / right[0].factor
        for x, y, at in self._views(i, left, right) or ():
            found = first_beyond(x, y, at, limit * left[0].factor, ratio)
            if found is not None:
                return _in_whole(found, left[0].whole)
        return None

    def _pair(self, i: int) -> ElementResults | None:
        left, right = self._shards(i)
        if not left or not right:
            return None
        # The output of one module is the input of the next: one tensor under several names.
        shards = ((row.samples_from, row.rank, row.tensor, row.shard, row.factor) for row in (*left, *right))
        key = (self._columns["step"][i], len(left), *shards)
        if key not in self._known:
            self._known[key] = self._measured(i, left, right)
        return self._known[key]

    def _measured(self, i: int, left: list[Saved], right: list[Saved]) -> ElementResults | None:
        if self._columns["tokens"][i] == "experts":
            return self._at_expert(i, left, right)
        views = self._views(i, left, right)
        if views is None:
            return None
        apart, ratio = Apart(), left[0].factor / right[0].factor
        for x, y, at in views:
            add_views(apart, x, y, at, ratio)
        scale = left[0].factor
        return ElementResults(
            apart.relative,
            math.sqrt(apart.squares) / scale,
            apart.largest / scale,
            apart.cosine,
            apart.differing,
            apart.unlike,
            None if apart.largest_at is None else _in_whole(apart.largest_at, left[0].whole),
            apart.numel,
        )

    def _at_expert(self, i: int, left: list[Saved], right: list[Saved]) -> ElementResults | None:
        """Tokens of an expert, matched by sample and position; the others are judged by statistics."""
        sides = Pair(self._tokens(self._sides.left, i, left), self._tokens(self._sides.right, i, right))
        if sides.left is None or sides.right is None:
            return None
        (numbers_x, x), (numbers_y, y) = sides.left, sides.right
        common, at_x, at_y = np.intersect1d(numbers_x, numbers_y, assume_unique=True, return_indices=True)
        rows = max(len(x.words), len(y.words), 1)
        if x.words.shape[1:] != y.words.shape[1:] or 2 * len(common) < rows:
            return None
        apart, scale = Apart(), left[0].factor
        x, y = View(x.dtype, x.words[at_x]), View(y.dtype, y.words[at_y])
        add_views(apart, x, y, (0,) * x.words.ndim, scale / right[0].factor)
        width = math.prod(x.words.shape[1:])
        at = apart.largest_at
        return ElementResults(
            apart.relative,
            math.sqrt(apart.squares) / scale,
            apart.largest / scale,
            apart.cosine,
            # Tokens that could not be matched may differ.
            apart.differing + (rows - len(common)) * width,
            apart.unlike,
            None if at is None else (*divmod(int(common[at[0]]), SAMPLE), *at[1:]),
            apart.numel,
        )

    def _tokens(self, side: _Side, i: int, rows: Sequence[Saved]) -> tuple[npt.NDArray[np.int64], View] | None:
        """Numbers and values of all tokens of an expert, of all ranks that hold a part of it."""
        numbers, words, dtype = [], [], ""
        for row in rows:
            spec = ShardSpec.parse(row.shard)
            cut = any(c.order != "samples" and side.sizes.get(c.axis, 1) > 1 for d in spec.dims for c in d.cuts)
            if spec.partial or cut or [dim.name for dim in spec.dims][:1] != ["x"]:
                return None
            found = side.experts.numbers(
                int(self._columns["step"][i]), str(self._columns["name"][i]), row.rank, row.samples_from
            )
            view = self._view(side, i, row)
            if found is None or len(found) != len(view.words):
                return None
            numbers.append(found)
            words.append(view.words)
            dtype = view.dtype
        together, known = np.concatenate(numbers), np.concatenate(words)
        clear = together >= 0
        return (together[clear], View(dtype, known[clear])) if len(np.unique(together[clear])) == clear.sum() else None

    def _shards(self, i: int) -> Pair[list[Saved]]:
        return self._sides.map(lambda side: self._of(side, i))

    def _of(self, side: _Side, i: int) -> list[Saved]:
        """Shards of pair `i` on one side; a recomputed forward may be paired with one that was not recomputed."""
        step, phase, *what = (self._columns[name][i] for name in _KEY)
        unit = int(self._columns["unit"][i])
        block = int(self._columns["block"][i])
        for chosen in dict.fromkeys((str(phase), "forward")):
            rows = side.saved.get((int(step), chosen, *map(str, what)), ())
            found = [row for row in rows if row.samples_from // unit == block]
            if found and self._columns["tokens"][i] == "fixed":
                found = [row for row in found if row.samples_from == found[0].samples_from]
            if found:
                return found
        return []

    def _views(
        self, i: int, left: list[Saved], right: list[Saved]
    ) -> Iterator[tuple[View, View, Index]] | list[tuple[View, View, Index]] | None:
        several = max(len({row.samples_from for row in rows}) for rows in (left, right)) > 1
        parts = Pair(self._parts(self._sides.left, i, left, several), self._parts(self._sides.right, i, right, several))
        if parts.left is not None and parts.right is not None:
            return meet(parts.left, parts.right)
        return self._rank_by_rank(i, left, right) if self._by_rank else None

    def _parts(self, side: _Side, i: int, rows: Sequence[Saved], several: bool) -> list[Part] | None:
        """Shards of one side with their places; `several` if either side holds the samples in several microbatches."""
        parts = []
        unit = int(self._columns["unit"][i])
        for row in rows:
            spec = ShardSpec.parse(row.shard)
            if row.whole is None or spec.unknown is not None or len(row.whole) != len(spec.dims):
                return None
            batch = None
            if several and self._columns["tokens"][i] == "samples":
                batch = (0, unit, row.samples_from - int(self._columns["block"][i]) * unit)
            view = self._view(side, i, row)
            part = part_of(view, spec, row.whole, row.place, side.sizes, batch)
            if part is None:
                return None
            parts.append(part)
        return parts

    def _view(self, side: _Side, i: int, row: Saved) -> View:
        return side.files.view(int(self._columns["step"][i]), row.rank, row.tensor, row.shape)

    def _rank_by_rank(self, i: int, left: list[Saved], right: list[Saved]) -> list[tuple[View, View, Index]] | None:
        """Two runs of one layout: shards without a known place are compared rank by rank."""
        if [(row.rank, row.shape) for row in left] != [(row.rank, row.shape) for row in right]:
            return None
        return [
            (self._view(self._sides.left, i, x), self._view(self._sides.right, i, y), (0,) * len(x.shape))
            for x, y in zip(left, right, strict=True)
        ]


def read_saved(connection: duckdb.DuckDBPyConnection, labelled: str) -> dict[tuple[Any, ...], list[Saved]]:
    """Saved shards, one per part, by step, phase, kind, name, io and path."""
    found: dict[tuple[Any, ...], list[Saved]] = defaultdict(list)
    for row in connection.execute(_SQL_SAVED.format(labelled=labelled)).fetchall():
        key, rest = (row[0], *map(sys.intern, row[1:6])), row[6:]
        found[key].append(
            Saved(
                int(rest[0]),
                int(rest[1]),
                str(rest[2]),
                tuple(rest[3]),
                None if rest[4] is None else tuple(rest[4]),
                sys.intern(rest[5] or ""),
                float(rest[6]),
                dict(zip(_AXES, rest[7:], strict=True)),
            )
        )
    return found


def _in_whole(at: Index, whole: Index | None) -> Index:
    """Shards of an optimizer count their elements in one dimension."""
    if whole is None or len(at) == len(whole) or len(at) != 1:
        return at
    return tuple(int(n) for n in np.unravel_index(at[0], whole))


def compare_tensors(golden: Run, run: Run, step: int | None, pairs: Pairs, progress: Progress | None = None) -> None:
    """Set `pairs.tensors` and exact distances where both runs saved their tensors; a no-op where one saved none."""
    connection = duckdb.connect()
    for side in (golden, run):
        rows = side.rows(connection, step).filter("kind not in ('routing', 'token')")
        if not rows.aggregate("count(tensor)").fetchall()[0][0]:
            return
    alike = same_layout(golden, run)
    labelled = Pair(
        labelled_query(connection, golden, step, "saved_l", by_rank=alike),
        labelled_query(connection, run, step, "saved_r", by_rank=alike),
    )
    tensors = TensorPairs(connection, Pair(golden, run), labelled, pairs.columns, alike)
    tensors.compare(progress)
    if tensors.results:
        pairs.tensors = tensors
        exact = tensors.column("distance")
        pairs.columns["distance"] = np.where(np.isnan(exact), pairs["distance"], exact)
