"""Communication matched across ranks: what one rank sent beside what the other received, and which ranks took part.

Each rank recorded the inputs and outputs of its own calls. Calls of one operation in one group happen in the same order
on all members, so the n-th call of each rank belong together; a send belongs to the n-th receive of its peer.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from msprobe_megatron.analysis.load.run import Run, RunError

_SAME_ON_ALL = ("all_reduce", "broadcast")


@dataclass
class MatchedExchange:
    """One communication with all ranks that took part. `finding` names an inconsistency; empty if there is none."""

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
    """Sum and norm of each rank's input."""
    outputs: dict[int, tuple[float, float]] = field(default_factory=dict)
    finding: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a page."""
        return asdict(self)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the calls of all ranks that can belong together."""
        return ("message", *self.ranks) if self.op == "send" else (self.op, tuple(self.ranks))

    def add(self, rank: int, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add the rows of one rank's call."""
        for _, seq, _, _, _, io, _, total, squares, non_finite in rows:
            self.seq.setdefault(rank, seq)
            statistics = (math.nan, math.nan) if non_finite or total is None else (total, math.sqrt(squares))
            side = self.inputs if io == "input" else self.outputs
            side.setdefault(rank, statistics)


def exchanges(run: Run, step: int) -> list[MatchedExchange]:
    """All communication of a step, in the order of the first rank that took part."""
    try:
        rows = run.rows(step=step).filter("kind = 'comm'")
    except RunError:
        return []
    columns = "rank, seq, microbatch, phase, name, io, extra, sum, sumsq, n_nan + n_posinf + n_neginf"
    matched: dict[tuple[Any, ...], MatchedExchange] = {}
    counts: dict[tuple[Any, ...], int] = defaultdict(int)
    for (rank, name), rows_of_call in _calls(rows.order("rank, seq").project(columns).fetchall()).items():
        call = _call(rank, name, step, rows_of_call[0])
        counts[rank, call.key] += 1
        matched.setdefault((call.key, counts[rank, call.key]), call).add(rank, rows_of_call)
    recorded = {rank for _, rank, _ in run.files}
    for exchange in matched.values():
        exchange.finding = _finding(exchange, recorded)
    return sorted(matched.values(), key=lambda exchange: min(exchange.seq.items()))


def _call(rank: int, name: str, step: int, row: tuple[Any, ...]) -> MatchedExchange:
    """One rank's call, from its first row, without its statistics."""
    _, _, microbatch, phase, *_ = row
    extra = _extra(row[6])
    op, ranks = str(extra.get("op", "")), [int(r) for r in extra.get("ranks", [])]
    if isinstance(extra.get("peer"), int):
        # Both ends of a message are the n-th from its sender to its receiver.
        op, ranks = "send", [rank, extra["peer"]] if op == "send" else [extra["peer"], rank]
    module = name.partition("/torch.distributed")[0]
    group, size = str(extra.get("group", "")), int(extra.get("bytes", 0))
    return MatchedExchange(op, group, ranks, module, step, microbatch, phase, size)


def _calls(rows: Iterable[tuple[Any, ...]]) -> dict[tuple[int, str], list[tuple[Any, ...]]]:
    """Rows grouped by call; a name is reused in other microbatches and phases."""
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


def _finding(exchange: MatchedExchange, recorded: set[int]) -> str:
    if exchange.op == "send":
        return _message_finding(exchange, recorded)
    absent = [rank for rank in exchange.ranks if rank in recorded and rank not in exchange.seq]
    if absent:
        return f"ranks {absent} did not take part"
    if exchange.op in _SAME_ON_ALL and exchange.outputs:
        first, *others = exchange.outputs.items()
        for rank, statistics in others:
            if not _equal(statistics, first[1]):
                return f"results differ: norm {first[1][1]:.6g} on rank {first[0]}, {statistics[1]:.6g} on rank {rank}"
    return ""


def _message_finding(exchange: MatchedExchange, recorded: set[int]) -> str:
    sender, receiver = exchange.ranks
    sent, received = exchange.inputs.get(sender), exchange.outputs.get(receiver)
    if sent is not None and received is not None and not _equal(sent, received):
        return f"rank {receiver} received norm {received[1]:.6g}, rank {sender} sent {sent[1]:.6g}"
    if sent is None and sender in recorded:
        return f"rank {sender} has no record of sending it"
    if received is None and receiver in recorded:
        return f"rank {receiver} has no record of receiving it"
    return ""


def _equal(left: tuple[float, float], right: tuple[float, float]) -> bool:
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(left, right, strict=True))


def totals(found: Iterable[MatchedExchange]) -> list[dict[str, Any]]:
    """Calls and bytes by operation and group, the largest first."""
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for exchange in found:
        entry = table.setdefault(
            (exchange.op, exchange.group), {"op": exchange.op, "group": exchange.group, "calls": 0, "bytes": 0}
        )
        entry["calls"] += 1
        entry["bytes"] += exchange.bytes
    return sorted(table.values(), key=lambda entry: -entry["bytes"])
