"""Agreement within a group: vectors of 64-bit digests, folded into one word, compared with the first member's.

Every member posts its fold, the first one its vector too. A member that differs from the first checks which others do;
the lowest of them reports for all. So a group that agrees costs one small message per member, and a disagreement is
reported once.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Read = Callable[[str, int], bytes]
"""`read(topic, rank)`: a message of another member; raises when there is none."""


class Disagreement(NamedTuple):
    """The `places` of the vector that differ, and the `odd` ones of all `ranks` (all, if there is no majority)."""

    places: list[int]
    odd: list[int]
    ranks: list[int]


def folded(words: Words, own: int = 0) -> bytes:
    """The message of a member: one word for its vector, and one that no other member should have."""
    keys = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        mixed = (words ^ keys) * np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(32)
        total = int((mixed * (keys | np.uint64(1))).sum(dtype=np.uint64))
    return struct.pack("<QQI", total, own, len(words))


def safe(digests: Words, not_numbers: npt.NDArray[np.int64]) -> Words:
    """Digests that depend on the number of NaNs and not on their bits."""
    marks = not_numbers.astype(np.uint64) + np.uint64(0x7FF8 << 48)
    return np.where(not_numbers > 0, marks, digests)


def compare(words: Words, own: int, rank: int, ranks: Sequence[int], read: Read) -> Disagreement | None:
    """The disagreement that this member has to report: None if there is none or another member reports it."""
    first, mine = ranks[0], folded(words, own)
    if rank == first:
        return None
    theirs = read("fold", first)
    if _vector(mine) == _vector(theirs):
        return None
    for other in ranks[1 : ranks.index(rank)]:
        if _vector(read("fold", other)) != _vector(theirs):
            return None
    votes = {other: _vector(read("fold", other)) for other in ranks if other != rank} | {rank: _vector(mine)}
    most, count = Counter(votes.values()).most_common(1)[0]
    odd = [other for other in ranks if votes[other] != most] if 2 * count > len(ranks) else list(ranks)
    vector = np.frombuffer(read("vector", first), np.uint64)
    if len(vector) != len(words):
        return Disagreement([], odd, list(ranks))
    return Disagreement([int(i) for i in np.flatnonzero(vector != words)], odd, list(ranks))


def same_own(own: int, rank: int, ranks: Sequence[int], read: Read) -> bool:
    """True if the first member has the same state as this one, where each should have its own."""
    return rank != ranks[0] and struct.unpack("<QQI", read("fold", ranks[0]))[1] == own


def untiled(parts: Sequence[Sequence[int]], numel: int) -> str | None:
    """Why ranges [start, stop) do not cover 0 to `numel` exactly once; None when they do.

    Example::

        >>> untiled([(0, 4), (5, 8)], 8)
        'elements 4 to 5 belong to no rank'
    """
    at = 0
    for start, stop in sorted((int(a), int(b)) for a, b in parts if b > a):
        if start > at:
            return f"elements {at} to {start} belong to no rank"
        if start < at:
            return f"elements {start} to {min(at, stop)} belong to two ranks"
        at = stop
    return None if at == numel else f"elements {at} to {numel} belong to no rank"


def _vector(message: bytes) -> tuple[int, int]:
    total, _, length = struct.unpack("<QQI", message)
    return int(total), int(length)
