"""Bits before tolerances: two runs of one layout on one stack of software, and the first tensor that is not the same.

A cast that should not be there, in a job that computes in bfloat16 anyway, changes bits at a known place and stays
within every tolerance. Two runs of one layout compute the same sums in the same order, so their rows are held against
each other rank by rank: by digests where both have them, else by every statistic. Rows are not merged first, because
adding up shards in another order would round differently.

Whether a difference in bits is a finding depends on the device: some kernels add in the order in which their threads
finish. A repetition of the golden run decides that. It has to equal the golden run in all bits of the phase that the
difference lies in, and of everything before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import duckdb
import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.match import COMPARED, STATISTICS, Pairs, same_layout
from msprobe_megatron.analysis.compare.merge import labelled_query
from msprobe_megatron.analysis.compare.verdict.judge import bits_of_pairs
from msprobe_megatron.analysis.compare.verdict.tolerance import is_updated_weight
from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.analysis.settings.env_diff import settings_apart

Flags = npt.NDArray[np.bool_]
_KEY = ("step", "samples_from", "phase", "kind", "name", "io", "path")
_STAGES = {"forward": 0, "recompute": 0, "backward": 1}
_LAST_STAGE = 2


@dataclass(frozen=True)
class Bits:
    """Which pairs are known to hold equal bits, and which are known not to."""

    equal: Flags
    differ: Flags
    ranks: dict[int, list[int]] = field(default_factory=dict)
    """Ranks on which a pair differs."""

    @property
    def known(self) -> bool:
        """True if anything could be compared bit by bit."""
        return bool(self.equal.any() or self.differ.any())

    def counts(self) -> dict[str, int]:
        """Number of pairs that are equal and that differ."""
        return {"equal": int(self.equal.sum()), "differ": int(self.differ.sum())}

    def first(self, order: npt.NDArray[np.int64], among: Flags) -> int | None:
        """The first pair in causal order that differs."""
        found = order[(self.differ & among)[order]]
        return int(found[0]) if len(found) else None


class Repetition(NamedTuple):
    """A repetition of the golden run, beside it."""

    run: Run
    pairs: Pairs


def chance(golden: Run, run: Run, step: int | None, pairs: Pairs, i: int, repetition: Repetition | None) -> str:
    """Why a difference in the bits of pair `i` is no finding by itself; empty if it is one."""
    settings = settings_apart(golden, run)
    if settings:
        more = f" and {len(settings) - 3} more" if len(settings) > 3 else ""
        return f"settings that change rounding differ: {', '.join(s.name for s in settings[:3])}{more}"
    if repetition is None:
        return "a repetition of GOLDEN, given as --noise, tells whether that is chance"
    if repetition.run.path.resolve() == golden.path.resolve():
        return "--noise is GOLDEN itself: a repetition tells whether that is chance"
    again = compare_bits(golden, repetition.run, step, repetition.pairs)
    if again is None:
        return "--noise has another layout than GOLDEN, so that its bits tell nothing"
    if not repeatable(pairs, i, repetition.pairs, again):
        return "so do those of GOLDEN and its repetition: the computation is not deterministic"
    return ""


# Rows of one rank and one key are told apart by their order.
_SQL_ROWS = """
create temp table bits_{side} as select {key}, rank, dtype, shape, digest, {statistics},
    row_number() over (partition by {key}, rank order by seq) as turn
from ({labelled})
"""
_SQL_BITS = """
select {key}, bool_or(measured) as measured, bool_or(differ) as differ,
    list(distinct rank order by rank) filter (where differ) as ranks
from (
    select {key}, rank, a.digest is null or b.digest is null as measured,
        a.dtype <> b.dtype
            or case when a.digest is not null and b.digest is not null then a.digest <> b.digest else {unlike} end
            as differ
    from bits_l a join bits_r b using ({key}, rank, turn)
    where a.shape = b.shape
        and ((a.digest is not null and b.digest is not null) or (a.sum is not null and b.sum is not null)))
group by {key}
"""


def compare_bits(golden: Run, run: Run, step: int | None, pairs: Pairs) -> Bits | None:
    """Bits of all pairs; None if the runs have other layouts or read their tensors in other ways."""
    if not same_layout(golden, run):
        return None
    found = _found(golden, run, step)
    index = _index(pairs)
    equal, differ = np.zeros(len(pairs), bool), np.zeros(len(pairs), bool)
    measured = np.zeros(len(pairs), bool)
    ranks: dict[int, list[int]] = {}
    for *key, by_statistics, unlike, where in found:
        i = index.get(tuple(key))
        if i is None:
            continue
        (differ if unlike else equal)[i] = True
        measured[i] = by_statistics
        if unlike:
            ranks[i] = [int(rank) for rank in where]
    if _measured_otherwise(pairs, measured, differ):
        differ &= ~measured
        equal &= ~measured
    same, other = bits_of_pairs(pairs)
    differ = (differ | other) & pairs.in_both()
    return Bits((equal | same) & pairs.in_both() & ~differ, differ, ranks)


def _found(golden: Run, run: Run, step: int | None) -> list[tuple[Any, ...]]:
    connection = duckdb.connect()
    key = ", ".join(_KEY)
    for side, of in (("l", golden), ("r", run)):
        labelled = labelled_query(connection, of, step, f"bits_of_{side}", kinds=COMPARED, by_rank=True)
        columns = ", ".join(STATISTICS)
        connection.execute(_SQL_ROWS.format(side=side, key=key, statistics=columns, labelled=labelled))
    unlike = " or ".join(f"a.{name} is distinct from b.{name}" for name in STATISTICS)
    found: list[tuple[Any, ...]] = connection.query(_SQL_BITS.format(key=key, unlike=unlike)).fetchall()
    return found


def _index(pairs: Pairs) -> dict[tuple[Any, ...], int]:
    first = (pairs["block"] * pairs["unit"]).tolist()
    columns = [first if name == "samples_from" else pairs[name].tolist() for name in _KEY]
    return {key: i for i, key in enumerate(zip(*columns, strict=True))}


def _measured_otherwise(pairs: Pairs, measured: Flags, differ: Flags) -> bool:
    """True if most weights of the first step differ in their statistics.

    Weights come from one checkpoint or seed: it is then the sums that were computed in another way (on another device,
    by another number of threads), or the weights are others, and bits tell nothing.
    """
    first = pairs["step"] == pairs["step"].min() if len(pairs) else np.zeros(0, bool)
    weights = measured & first & (pairs["kind"] == "parameter") & ~is_updated_weight(pairs)
    return bool(weights.any() and differ[weights].mean() > 0.5)


def repeatable(pairs: Pairs, i: int, repeated: Pairs, again: Bits) -> bool:
    """True if the repetition has equal bits in the phase of pair `i` and everything before, pair `i` included."""
    keys = repeated.keys()
    wanted = pairs.keys()[i]
    if wanted not in keys or not again.equal[keys.index(wanted)]:
        return False
    limit = stages(pairs)[i]
    before = (repeated["step"] < pairs["step"][i]) | (
        (repeated["step"] == pairs["step"][i]) & (stages(repeated) <= limit)
    )
    return not bool((again.differ & before).any())


def stages(pairs: Pairs) -> npt.NDArray[np.int64]:
    """0 for tensors of the forward, 1 of the backward, 2 of what comes after; weights are the forward's."""
    given = (pairs["kind"] == "parameter") & ~is_updated_weight(pairs)
    found = np.array([_STAGES.get(phase, _LAST_STAGE) for phase in pairs["phase"]], np.int64)
    return np.where(given, 0, found)
