"""Saved tensors of two runs, pair by pair: exact figures in place of estimates.

Comes after `match`. For each pair of whole tensors of which both runs have saved all shards, the shards are brought
together as views (`assembly`) and gone through once (`elements`). Pairs without tensors keep what rows tell.
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

from msprobe_megatron.analyse.assembly import Part, meet, part_of
from msprobe_megatron.analyse.elements import Apart, Index, View, add_views, first_beyond
from msprobe_megatron.analyse.expert_tokens import SAMPLE, ExpertTokens
from msprobe_megatron.analyse.load import Run, RunError
from msprobe_megatron.analyse.match import Pairs, same_layout
from msprobe_megatron.analyse.merge import labelled_query
from msprobe_megatron.analyse.tensors import TensorFiles
from msprobe_megatron.topology.shards import ShardSpec

Progress = Callable[[int, int], None]
"""Called with how many pairs of how many are done."""

_AXES = ("tp", "pp", "dp", "cp", "ep", "etp", "edp")
_WHAT = ("step", "phase", "kind", "name", "io", "path")

_QUERY = f"""
select {", ".join(_WHAT)}, samples_from, rank, tensor, shape, global_shape, shard, factor, {", ".join(_AXES)}
from (select *, row_number() over (partition by {", ".join(_WHAT)}, samples_from, part order by rank) as replica
    from ({{labelled}}) where tensor is not null) where replica = 1 order by samples_from, rank
"""  # noqa: S608


class Saved(NamedTuple):
    """One saved shard: whose it is, its key, and where it lies."""

    samples_from: int
    rank: int
    tensor: str
    shape: Index
    whole: Index | None
    shard: str
    factor: float
    place: dict[str, int]


class Elements(NamedTuple):
    """Figures of one pair, in the units of the golden run's tensor as it is judged."""

    relative: float
    distance: float
    largest: float
    cosine: float
    differing: int
    unlike: int
    largest_at: Index | None
    numel: int


class TensorPairs:
    """The pairs of a comparison that both runs have saved as tensors.

    Example::

        tensors = TensorPairs(connection, (golden, run), (query, query), pairs.columns, by_rank=False)
        tensors.figures[17].cosine
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        runs: tuple[Run, Run],
        labelled: tuple[str, str],
        columns: dict[str, npt.NDArray[Any]],
        by_rank: bool,
    ) -> None:
        self._sizes = [run.sizes for run in runs]
        self._files = [TensorFiles(run) for run in runs]
        self._saved = [read_saved(connection, query) for query in labelled]
        self._columns, self._by_rank = columns, by_rank
        self._experts = [
            ExpertTokens(saved, files, run.sizes)
            for saved, files, run in zip(self._saved, self._files, runs, strict=True)
        ]
        self._known: dict[tuple[Any, ...], Elements | None] = {}
        self.figures: dict[int, Elements] = {}
        self.problems: list[str] = []

    def compare(self, progress: Progress | None = None) -> None:
        """Go through all pairs; `figures` holds those that could be compared."""
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
                self.figures[i] = found

    def column(self, name: str, absent: float = math.nan) -> npt.NDArray[np.float64]:
        """One of the figures of all pairs."""
        values = np.full(len(self._columns["step"]), absent)
        for i, found in self.figures.items():
            values[i] = getattr(found, name)
        return values

    def first(self, i: int, limit: float) -> Index | None:
        """First element of pair `i`, in the order of its shards, that differs by more than `limit`."""
        if self._columns["tokens"][i] == "experts":
            return self.figures[i].largest_at
        left, right = (self._of(side, i) for side in (0, 1))
        ratio = left[0].factor / right[0].factor
        for x, y, at in self._views(i, left, right) or ():
            found = first_beyond(x, y, at, limit * left[0].factor, ratio)
            if found is not None:
                return _in_whole(found, left[0].whole)
        return None

    def _pair(self, i: int) -> Elements | None:
        left, right = (self._of(side, i) for side in (0, 1))
        if not left or not right:
            return None
        # The output of one module is the input of the next: one tensor, many names.
        shards = ((row.samples_from, row.rank, row.tensor, row.shard, row.factor) for row in (*left, *right))
        key = (self._columns["step"][i], len(left), *shards)
        if key not in self._known:
            self._known[key] = self._measured(i, left, right)
        return self._known[key]

    def _measured(self, i: int, left: list[Saved], right: list[Saved]) -> Elements | None:
        if self._columns["tokens"][i] == "experts":
            return self._at_expert(i, left, right)
        views = self._views(i, left, right)
        if views is None:
            return None
        apart, ratio = Apart(), left[0].factor / right[0].factor
        for x, y, at in views:
            add_views(apart, x, y, at, ratio)
        scale = left[0].factor
        return Elements(
            apart.relative,
            math.sqrt(apart.squares) / scale,
            apart.largest / scale,
            apart.cosine,
            apart.differing,
            apart.unlike,
            None if apart.largest_at is None else _in_whole(apart.largest_at, left[0].whole),
            apart.numel,
        )

    def _at_expert(self, i: int, left: list[Saved], right: list[Saved]) -> Elements | None:
        """Tokens of an expert, matched by sample and position; those that only one side has are left to statistics."""
        sides = [self._tokens(side, i, rows) for side, rows in enumerate((left, right))]
        if sides[0] is None or sides[1] is None:
            return None
        (numbers_x, x), (numbers_y, y) = sides[0], sides[1]
        common, at_x, at_y = np.intersect1d(numbers_x, numbers_y, assume_unique=True, return_indices=True)
        rows = max(len(x.words), len(y.words), 1)
        if x.words.shape[1:] != y.words.shape[1:] or 2 * len(common) < rows:
            return None
        apart, scale = Apart(), left[0].factor
        x, y = View(x.dtype, x.words[at_x]), View(y.dtype, y.words[at_y])
        add_views(apart, x, y, (0,) * x.words.ndim, scale / right[0].factor)
        width = math.prod(x.words.shape[1:])
        at = apart.largest_at
        return Elements(
            apart.relative,
            math.sqrt(apart.squares) / scale,
            apart.largest / scale,
            apart.cosine,
            # Tokens that could not be told apart may differ.
            apart.differing + (rows - len(common)) * width,
            apart.unlike,
            None if at is None else (*divmod(int(common[at[0]]), SAMPLE), *at[1:]),
            apart.numel,
        )

    def _tokens(self, side: int, i: int, rows: Sequence[Saved]) -> tuple[npt.NDArray[np.int64], View] | None:
        """Numbers and values of all tokens of an expert, of all ranks that share it."""
        numbers, words, dtype = [], [], ""
        for row in rows:
            spec = ShardSpec.parse(row.shard)
            cut = any(c.order != "samples" and self._sizes[side].get(c.axis, 1) > 1 for d in spec.dims for c in d.cuts)
            if spec.partial or cut or [dim.name for dim in spec.dims][:1] != ["x"]:
                return None
            found = self._experts[side].numbers(
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

    def _of(self, side: int, i: int) -> list[Saved]:
        """Shards of pair `i` on one side; a repeated forward may stand against one that was not repeated."""
        step, phase, *what = (self._columns[name][i] for name in _WHAT)
        unit = int(self._columns["unit"][i])
        block = int(self._columns["block"][i])
        for chosen in dict.fromkeys((str(phase), "forward")):
            rows = self._saved[side].get((int(step), chosen, *map(str, what)), ())
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
        sides = [self._parts(side, i, rows, several) for side, rows in enumerate((left, right))]
        if sides[0] is not None and sides[1] is not None:
            return meet(sides[0], sides[1])
        return self._rank_by_rank(i, left, right) if self._by_rank else None

    def _parts(self, side: int, i: int, rows: Sequence[Saved], several: bool) -> list[Part] | None:
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
            part = part_of(view, spec, row.whole, row.place, self._sizes[side], batch)
            if part is None:
                return None
            parts.append(part)
        return parts

    def _view(self, side: int, i: int, row: Saved) -> View:
        return self._files[side].view(int(self._columns["step"][i]), row.rank, row.tensor, row.shape)

    def _rank_by_rank(self, i: int, left: list[Saved], right: list[Saved]) -> list[tuple[View, View, Index]] | None:
        """Two runs of one layout: what has no known place is compared as the ranks hold it."""
        if [(row.rank, row.shape) for row in left] != [(row.rank, row.shape) for row in right]:
            return None
        return [
            (self._view(0, i, x), self._view(1, i, y), (0,) * len(x.shape)) for x, y in zip(left, right, strict=True)
        ]


def read_saved(connection: duckdb.DuckDBPyConnection, labelled: str) -> dict[tuple[Any, ...], list[Saved]]:
    """Saved shards, one of each part, by step, phase, kind, name, io and path.

    Example::

        read_saved(connection, labelled_query(connection, run, 0, "saved"))[0, "forward", "activation", ...]
    """
    found: dict[tuple[Any, ...], list[Saved]] = defaultdict(list)
    for row in connection.execute(_QUERY.replace("{labelled}", labelled)).fetchall():
        what, rest = row[:6], row[6:]
        names = tuple(map(sys.intern, what[1:]))
        key = (what[0], *names)
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
    """Give the pairs exact figures where both runs have saved their tensors; nothing happens where one has none.

    Example::

        compare_tensors(golden, run, None, pairs)
        pairs.tensors.figures if pairs.tensors else {}
    """
    connection = duckdb.connect()
    for side in (golden, run):
        if not side.rows(connection, step).aggregate("count(tensor)").fetchall()[0][0]:
            return
    alike = same_layout(golden, run)
    queries = [
        labelled_query(connection, side, step, f"saved_{i}", by_rank=alike) for i, side in enumerate((golden, run))
    ]
    tensors = TensorPairs(connection, (golden, run), (queries[0], queries[1]), pairs.columns, alike)
    tensors.compare(progress)
    if tensors.figures:
        pairs.tensors = tensors
        exact = tensors.column("distance")
        pairs.columns["distance"] = np.where(np.isnan(exact), pairs["distance"], exact)
