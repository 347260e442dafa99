"""Whether the members of a group agree: vectors of 64-bit digests, folded into one, compared with the first member's.

Every member posts its fold, the first one its vector too. Who differs from the first looks who else does; the first of
those tells, for all. So a group that agrees costs one small message a member, and a disagreement is told once.
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
    """Which `places` of the vector differ, and the `odd` of all `ranks` (all, where no majority says who is right)."""

    places: list[int]
    odd: list[int]
    ranks: list[int]


def folded(words: Words, own: int = 0) -> bytes:
    """The message of a member: one word for its vector, and one that should be its alone.

    Example::

        folded(np.array([1, 2], np.uint64))
    """
    keys = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        mixed = (words ^ keys) * np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(32)
        total = int((mixed * (keys | np.uint64(1))).sum(dtype=np.uint64))
    return struct.pack("<QQI", total, own, len(words))


def safe(digests: Words, not_numbers: npt.NDArray[np.int64]) -> Words:
    """Digests that do not depend on the bits of a NaN: only on how many there are.

    Example::

        safe(digests, counts[:, 0])
    """
    marks = not_numbers.astype(np.uint64) + np.uint64(0x7FF8 << 48)
    return np.where(not_numbers > 0, marks, digests)


def compare(words: Words, own: int, rank: int, ranks: Sequence[int], read: Read) -> Disagreement | None:
    """What this member has to tell of its group: None where all is well or another member tells.

    Example::

        compare(words, 0, rank=1, ranks=(0, 1), read=lambda topic, rank: board[topic, rank])
    """
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
    """Whether the first member has the very state that each should have for itself.

    Example::

        same_own(digest, rank=1, ranks=(0, 1), read=read)
    """
    return rank != ranks[0] and struct.unpack("<QQI", read("fold", ranks[0]))[1] == own


def untiled(parts: Sequence[Sequence[int]], numel: int) -> str | None:
    """What is wrong with ranges [start, stop) that should cover 0 to `numel` once; None when they do.

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
