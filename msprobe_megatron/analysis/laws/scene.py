"""What a law looks at: the recorded rows of a few steps of one run, from all ranks, and the facts of the job.

Rows of the dump and of the monitor are read alike; where both recorded the same tensor, the dump's row is kept. Rows
that hold a NaN or an Inf are left out: they are a finding of their own, and no identity holds for them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import duckdb

from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.topology.shards import ShardSpec

MOST_STEPS = 8
"""Steps that are looked at: the first ones and the last one."""
MOST_ROWS = 1_500_000
"""Rows that are held in memory at once; beyond, fewer steps are looked at."""
_COLUMNS = (
    "rank, step, microbatch, phase, seq, vpp, kind, name, io, path, op, dtype, shape, shard, numel, min, max, sum,"
    " sumsq, absmax, n_zero, digest"
)
_EPSILON = {"float64": 2.3e-16, "float32": 1.2e-7, "bfloat16": 7.9e-3, "float16": 9.8e-4}


class Row(NamedTuple):
    """One recorded tensor of one rank."""

    rank: int
    step: int
    microbatch: int | None
    phase: str
    seq: int
    vpp: int | None
    kind: str
    name: str
    io: str
    path: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    numel: int
    min: float
    max: float
    sum: float
    sumsq: float
    absmax: float
    zeros: int
    digest: int | None

    @property
    def norm(self) -> float:
        """Root of the sum of squares."""
        return math.sqrt(max(self.sumsq, 0.0))

    @property
    def spread(self) -> float:
        """The largest sum of magnitudes that this norm allows."""
        return self.norm * math.sqrt(max(self.numel, 1))

    @property
    def epsilon(self) -> float:
        """Relative spacing of the dtype; 0 for integers."""
        return _EPSILON.get(self.dtype, 0.0)

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Which tensor of the model it is."""
        return self.kind, self.name, self.io, self.path


@lru_cache(maxsize=4096)
def spec_of(shard: str) -> ShardSpec:
    """The shard spec of a row; one that cannot be read is unknown."""
    try:
        return ShardSpec.parse(shard)
    except ValueError:
        return ShardSpec.unmergeable("unreadable")


class Step:
    """The rows of one step, found by kind and name."""

    def __init__(self, number: int, rows: Iterable[Row]) -> None:
        self.number = number
        self.rows = list(rows)
        self._kinds: dict[str, list[Row]] = defaultdict(list)
        self._names: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in self.rows:
            self._kinds[row.kind].append(row)
            self._names[row.kind, row.name].append(row)

    def of(self, kind: str, name: str | None = None, io: str | None = None, path: str | None = None) -> list[Row]:
        """Rows of a kind, of one name, side and path where these are given."""
        found = self._kinds.get(kind, []) if name is None else self._names.get((kind, name), [])
        return [row for row in found if (io is None or row.io == io) and (path is None or row.path == path)]

    def names(self, kind: str) -> list[str]:
        """All names that rows of a kind have, in order of appearance."""
        return list(dict.fromkeys(row.name for row in self._kinds.get(kind, [])))


class Scene:
    """One run as the laws see it."""

    def __init__(self, run: Run, step: int | None = None) -> None:
        self.run = run
        self.sizes = {axis: max(size, 1) for axis, size in run.sizes.items()}
        self.arguments: dict[str, Any] = run.facts.get("arguments", {}) or {}
        content = run.facts.get("probe", {}).get("content", {}) or {}
        self.dump: dict[str, Any] = content.get("dump") or {}
        self.only = step

    @cached_property
    def places(self) -> dict[int, dict[str, int]]:
        """Coordinates of every rank."""
        found = {int(entry["rank"]): entry for entry in self.run.facts.get("ranks", []) if "rank" in entry}
        found.update({rank: facts.get("coordinates", {}) for rank, facts in self.run.ranks.items()})
        return found

    def at(self, rank: int, axis: str) -> int:
        """Coordinate of a rank on an axis."""
        return int(self.places.get(rank, {}).get(axis, 0))

    def size(self, axis: str) -> int:
        """Size of an axis; 1 where it is not used."""
        return self.sizes.get(axis, 1)

    @cached_property
    def steps(self) -> list[Step]:
        """The steps that are looked at, in order."""
        connection = duckdb.connect()
        sources = []
        # A run that was only monitored lists the monitor's files as its rows.
        dumped = [str(path) for _, _, path in self.run.files] if self.run.files else []
        monitored = [str(part.path) for part in self.run.monitor]
        if set(dumped) - set(monitored):
            sources.append(connection.read_parquet(sorted(set(dumped) - set(monitored))))
        if monitored:
            sources.append(connection.read_parquet(monitored))
        counts: dict[int, int] = defaultdict(int)
        for source in sources:
            for number, count in source.aggregate("step, count(*)", "step").fetchall():
                counts[int(number)] += int(count)
        numbers = sorted(counts) if self.only is None else [n for n in sorted(counts) if n == self.only]
        chosen: list[int] = []
        rows = 0
        for number in [*numbers[: MOST_STEPS - 1], *numbers[MOST_STEPS - 1 :][-1:]]:
            rows += counts[number]
            if chosen and rows > MOST_ROWS:
                break
            chosen.append(number)
        return [Step(number, self._read(sources, number)) for number in chosen]

    def _read(self, sources: list[duckdb.DuckDBPyRelation], number: int) -> list[Row]:
        found: dict[tuple[Any, ...], Row] = {}
        for source in sources:
            rows = source.filter(f"step = {int(number)} and n_nan + n_posinf + n_neginf = 0 and sum is not null")
            seen: dict[tuple[Any, ...], int] = defaultdict(int)
            fresh: dict[tuple[Any, ...], Row] = {}
            for values in rows.project(_COLUMNS).order("rank, seq").fetchall():
                row = Row(*values)._replace(shape=tuple(values[12] or ()))
                if row.kind == "parameter" and row.path == "before":
                    row = row._replace(path="")
                key = (row.rank, row.microbatch, row.phase, *row.place)
                seen[key] += 1
                numbered = (*key, seen[key])
                fresh[numbered] = row
            for key, row in fresh.items():
                found.setdefault(key, row)
        return list(found.values())

    @cached_property
    def tolerance(self) -> float:
        """How far equal tensors may lie apart in their sums: devices without double precision add in single."""
        for step in self.steps:
            for row in step.rows[:2000]:
                # A sum of doubles has more digits than single precision can hold, save by chance.
                if row.numel > 8 and abs(row.sum) > 1e-6 and _single(row.sum) != row.sum:
                    return 1e-11
        return 1e-4

    def same(self, left: Row, right: Row) -> bool:
        """Whether two tensors of one shape hold the same bits, as far as digests or statistics can tell."""
        if left.numel != right.numel:
            return False
        if left.digest is not None and right.digest is not None and left.shard == right.shard:
            return left.digest == right.digest
        exact = (left.min, left.max, left.absmax, left.zeros) == (right.min, right.max, right.absmax, right.zeros)
        room = self.tolerance
        return (
            exact
            and abs(left.sum - right.sum) <= room * max(left.spread, 1e-300)
            and abs(left.sumsq - right.sumsq) <= room * max(left.sumsq, 1e-300)
        )

    def coordinates(self, row: Row) -> tuple[int, ...]:
        """Where on the axes that cut it a rank's part of a tensor lies."""
        return tuple(self.at(row.rank, axis) for axis in spec_of(row.shard).cut_axes())

    def parts(self, rows: Iterable[Row]) -> list[Row]:
        """Each part of a tensor once, of all ranks that hold it, for every microbatch."""
        found: dict[tuple[Any, ...], Row] = {}
        for row in rows:
            found.setdefault((row.microbatch, row.shard, self.coordinates(row)), row)
        return list(found.values())

    def weight_parts(self, rows: Iterable[Row]) -> list[Row]:
        """Each part of a weight-like tensor once; a weight that two pipeline stages share is that of the first."""
        rows = list(rows)
        first = min((self.at(row.rank, "pp") for row in rows), default=0)
        return self.parts(row for row in rows if self.at(row.rank, "pp") == first)

    def argument(self, name: str) -> Any:
        """A training argument; None where it is not known."""
        return self.arguments.get(name)

    @property
    def every_microbatch(self) -> bool:
        """Whether all microbatches of a recorded step are there."""
        return self.dump.get("microbatches") in (None, "all")

    def microbatches(self, step: Step) -> int | None:
        """How many microbatches the step had, by the arguments or by what was recorded; None where they disagree."""
        seen = {row.microbatch for row in step.rows if row.microbatch is not None}
        counted = max(seen) + 1 if seen else None
        given = self.argument("num_microbatches")
        if given is None and self.argument("global_batch_size") and self.argument("micro_batch_size"):
            share = int(self.argument("micro_batch_size")) * self.size("dp")
            given = int(self.argument("global_batch_size")) // share
        if given is not None and counted is not None and int(given) != counted:
            return None
        return int(given) if given is not None else counted


def _single(value: float) -> float:
    import struct

    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf


def check_rows(paths: Iterable[str], io: str) -> list[tuple[int, int, str, str, str, dict[str, Any]]]:
    """Step, rank, name, class, dtype and facts of the rows that a check wrote; unreadable ones are left out."""
    rows = duckdb.connect().read_parquet(list(paths)).filter(f"kind = 'check' and io = '{io}'")
    columns = rows.order("step, rank, seq").project("step, rank, name, op, dtype, extra").fetchall()
    found = []
    for step, rank, name, op, dtype, extra in columns:
        try:
            facts = json.loads(extra)
        except (TypeError, ValueError):
            continue
        if isinstance(facts, dict):
            found.append((int(step), int(rank), str(name), str(op), str(dtype), facts))
    return found
