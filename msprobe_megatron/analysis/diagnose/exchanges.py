"""Communication put together again: what one rank sent beside what the other received, and who took part.

Each rank wrote what went into and came out of its own calls. Calls of one operation in one group happen in the same
order on all its members, so that the n-th of each belong together; a send belongs to the n-th receive of its peer.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from msprobe_megatron.analyse.load import Run, RunError

_SAME_ON_ALL = ("all_reduce", "broadcast")


@dataclass
class Exchange:
    """One communication with everybody who took part. `finding` says what does not fit, "" when all does."""

    op: str
    group: str
    ranks: list[int]
    module: str
    step: int
    microbatch: int | None
    phase: str
    bytes: int
    seq: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Sum and norm of what each rank gave."""
    outputs: dict[int, tuple[float, float]] = field(default_factory=dict)
    finding: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a page."""
        return asdict(self)


def exchanges(run: Run, step: int) -> list[Exchange]:
    """All communication of a step, in the order of the first rank that took part.

    Example::

        [x.finding for x in exchanges(open_run("probe_out"), step=10) if x.finding]
    """
    try:
        rows = run.rows(step=step).filter("kind = 'comm'")
    except RunError:
        return []
    found = (
        rows.order("rank, seq")
        .project("rank, seq, microbatch, phase, name, io, extra, sum, sumsq, n_nan + n_posinf + n_neginf")
        .fetchall()
    )
    together: dict[tuple[Any, ...], Exchange] = {}
    counts: dict[tuple[Any, ...], int] = defaultdict(int)
    calls = _calls(found)
    for (rank, name), rows_of_call in calls.items():
        extra = _extra(rows_of_call[0][6])
        op, ranks = str(extra.get("op", "")), [int(r) for r in extra.get("ranks", [])]
        peer = int(extra["peer"]) if isinstance(extra.get("peer"), int) else None
        # A pair is named by its sender: the n-th message from one rank to another.
        pair = [] if peer is None else [rank, peer] if op == "send" else [peer, rank]
        what = ("message", *pair) if pair else (op, tuple(ranks))
        counts[rank, what] += 1
        key = (*what, counts[rank, what])
        exchange = together.get(key)
        if exchange is None:
            _, seq, microbatch, phase, *_ = rows_of_call[0]
            exchange = together[key] = Exchange(
                "send" if pair else op,
                str(extra.get("group", "")),
                pair or ranks,
                name.partition("/torch.distributed")[0],
                step,
                microbatch,
                phase,
                int(extra.get("bytes", 0)),
            )
        for _, seq, _, _, _, io, _, total, squares, bad in rows_of_call:
            exchange.seq.setdefault(rank, seq)
            figures = (math.nan, math.nan) if bad or total is None else (total, math.sqrt(squares))
            side = exchange.inputs if io == "input" else exchange.outputs
            side.setdefault(rank, figures)
    ordered = list(together.values())
    selected = {rank for _, rank, _ in run.files}
    for exchange in ordered:
        exchange.finding = _finding(exchange, selected)
    return sorted(ordered, key=lambda x: min(x.seq.items()))


def _calls(rows: Iterable[tuple[Any, ...]]) -> dict[tuple[int, str], list[tuple[Any, ...]]]:
    """Rows of one call together; a name is used again in another microbatch or phase."""
    calls: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    last: dict[tuple[int, str], tuple[Any, ...]] = {}
    for row in rows:
        rank, seq, microbatch, phase, name, io = row[:6]
        open_call = last.get((rank, name))
        known = calls.get(open_call) if open_call is not None else None
        same = known is not None and known[0][2:4] == (microbatch, phase) and not any(r[5] == io for r in known)
        key = open_call if same and open_call is not None else (rank, name, seq)
        calls.setdefault(key, []).append(row)
        last[rank, name] = key
    numbered: dict[tuple[int, str], list[tuple[Any, ...]]] = {}
    for (rank, name, seq), found in calls.items():
        numbered[rank, f"{name}#{seq}"] = found
    return numbered


def _extra(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _finding(exchange: Exchange, recorded: set[int]) -> str:
    if exchange.op == "send":
        sender, receiver = exchange.ranks
        sent, got = exchange.inputs.get(sender), exchange.outputs.get(receiver)
        if sent is not None and got is not None and not _equal(sent, got):
            return f"rank {receiver} received norm {got[1]:.6g}, rank {sender} sent {sent[1]:.6g}"
        for side, rank, word in ((sent, sender, "sent"), (got, receiver, "received")):
            if side is None and rank in recorded:
                return f"rank {rank} has no record of what it {word}"
        return ""
    absent = [rank for rank in exchange.ranks if rank in recorded and rank not in exchange.seq]
    if absent:
        return f"ranks {absent} took no part"
    if exchange.op in _SAME_ON_ALL and exchange.outputs:
        first, *others = exchange.outputs.items()
        for rank, figures in others:
            if not _equal(figures, first[1]):
                return f"results differ: norm {first[1][1]:.6g} on rank {first[0]}, {figures[1]:.6g} on rank {rank}"
    return ""


def _equal(left: tuple[float, float], right: tuple[float, float]) -> bool:
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(left, right, strict=True))


def totals(found: Iterable[Exchange]) -> list[dict[str, Any]]:
    """Calls and bytes by operation and group, the largest first.

    Example::

        totals(exchanges(run, step=10))[0]      # {"op": "all_reduce", "group": "tp", "calls": 24, "bytes": 393216}
    """
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for exchange in found:
        entry = table.setdefault(
            (exchange.op, exchange.group), {"op": exchange.op, "group": exchange.group, "calls": 0, "bytes": 0}
        )
        entry["calls"] += 1
        entry["bytes"] += exchange.bytes
    return sorted(table.values(), key=lambda entry: -entry["bytes"])
