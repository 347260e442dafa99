"""Ranks of one run that were not set up alike: other versions, another probe file, another clock.

Each rank writes down its own; nothing compares them while the job runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_APART = 600
_SHOWN = 8


def disagreements(ranks: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """One sentence for each thing that some ranks have otherwise than most.

    Example::

        disagreements({0: {"own": {"probe": "a"}}, 1: {"own": {"probe": "a"}}, 2: {"own": {"probe": "b"}}})
        # ["ranks [2]: another probe file than the other ranks"]
    """
    own = {rank: facts["own"] for rank, facts in sorted(ranks.items()) if facts.get("own")}
    found = []
    packages = sorted({str(name) for facts in own.values() for name in facts.get("versions", {})})
    for name in packages:
        versions = {rank: str(facts.get("versions", {}).get(name)) for rank, facts in own.items()}
        for value, most, odd in _odd(versions):
            found.append(f"{_ranks(odd)}: {name} {value}; the other ranks have {most}")
    probes = {rank: str(facts.get("probe", "")) for rank, facts in own.items()}
    found.extend(f"{_ranks(odd)}: another probe file than the other ranks" for _, _, odd in _odd(probes))
    clocks = sorted(facts["clock"] for facts in own.values() if "clock" in facts)
    if clocks:
        # Of two clocks nobody knows which is right: the lowest rank's is the one that logs show.
        first = own[min(own)].get("clock", clocks[0])
        middle = clocks[len(clocks) // 2] if len(clocks) > 2 else first
        odd = [rank for rank, facts in own.items() if abs(facts.get("clock", middle) - middle) > _APART]
        if odd:
            apart = max(abs(own[rank]["clock"] - middle) for rank in odd)
            found.append(f"{_ranks(odd)}: their clocks, or when they ended, are {apart} s off; rows carry no times")
    return found


def _odd(values: Mapping[int, str]) -> list[tuple[str, str, list[int]]]:
    """Each value that is not that of most ranks (of the lowest, if there is no majority), and who has it."""
    if len(set(values.values())) < 2:
        return []
    most = Counter(values.values()).most_common(1)[0][0]
    others = sorted(set(values.values()) - {most})
    return [(value, most, [rank for rank, mine in values.items() if mine == value]) for value in others]


def _ranks(ranks: list[int]) -> str:
    return f"ranks {ranks[:_SHOWN]}{' …' if len(ranks) > _SHOWN else ''}"
