"""What a run holds, in a few lines: rows by layer and kind, and what was asked but did not happen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from msprobe_megatron.analyse.disagreements import disagreements
from msprobe_megatron.analyse.load import Run, RunError
from msprobe_megatron.analyse.merge import merged
from msprobe_megatron.analyse.monitor_files import steps_of
from msprobe_megatron.record.events import read_events
from msprobe_megatron.topology.layers import layer_of


@dataclass(frozen=True)
class Line:
    """One line of the table: a layer (or the part outside the layers) and a kind, shards put together."""

    place: str
    kind: str
    names: int
    tensors: int
    absmax: float | None
    norm: float | None
    zeros: float | None
    non_finite: int
    replicas_agree: bool


@dataclass(frozen=True)
class Summary:
    """Everything that `msprobe-megatron summary` shows."""

    path: str
    world: int
    sizes: dict[str, int]
    versions: dict[str, str]
    steps: list[int]
    ranks: list[int]
    rows: int
    bytes: int
    lines: list[Line]
    unmerged: dict[str, int]
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


_BY_NAME = """
kind, name, count(*) as n, max(absmax) as absmax, sum(sumsq) as sumsq, sum(n_zero) as zeros, sum(numel) as numel,
sum(n_nan + n_posinf + n_neginf) as bad, bool_and(replicas_agree) as agree
"""


def summarise(run: Run, step: int | None = None) -> Summary:
    """Summary of a run, or of one of its steps.

    Example::

        summarise(open_run("probe_out")).lines[0].rows
    """
    chosen = [entry for entry in run.files if step is None or entry[0] == step]
    if not run.files:  # a run that only examined operators
        chosen = [(number, part.rank, part.path) for part in run.perturb for number in steps_of(part)]
    lines: list[Line] = []
    unmerged: dict[str, int] = {}
    total = 0
    try:
        relation = run.rows(step=step)
        lines = _lines(merged(run, step).aggregate(_BY_NAME, "kind, name").fetchall())
        for text, count in relation.filter("shard like '?%'").aggregate("shard, count(*)", "shard").fetchall():
            unmerged[text[1:]] = count
        total = len(relation)
    except RunError as error:
        if step is not None:
            raise
        if not run.perturb and _expects_rows(run):
            run.problems.append(str(error))
        total = len(run.perturb_rows()) if run.perturb else 0
    return Summary(
        path=str(run.path),
        world=int(run.facts.get("world", 1)),
        sizes=_used(run.sizes),
        versions=dict(run.facts.get("versions", {})),
        steps=sorted({number for number, _, _ in chosen}),
        ranks=sorted({rank for _, rank, _ in chosen}),
        rows=total,
        bytes=sum(path.stat().st_size for path in {path for _, _, path in chosen}),
        lines=lines,
        unmerged=unmerged,
        warnings=warnings(run),
    )


def _used(sizes: dict[str, int]) -> dict[str, int]:
    """Axes that are used. Megatron gives experts the TP size and the rest of the data parallel one by default."""
    implied = {"etp": sizes.get("tp", 1), "edp": sizes.get("dp", 1) * sizes.get("cp", 1)}
    return {axis: size for axis, size in sizes.items() if size > 1 and implied.get(axis) != size}


def _lines(rows: list[tuple[Any, ...]]) -> list[Line]:
    groups: dict[tuple[int, str, str], list[tuple[Any, ...]]] = {}
    for row in rows:
        kind, name = row[0], row[1]
        layer = layer_of(name)
        place = f"layer {layer}" if layer is not None else _outside(kind, name)
        groups.setdefault((_order(layer, name), place, kind), []).append(row)
    return [_line(place, kind, groups[key]) for key in sorted(groups) for _, place, kind in (key,)]


def _line(place: str, kind: str, rows: list[tuple[Any, ...]]) -> Line:
    largest = [row[3] for row in rows if row[3] is not None]
    squares = [row[4] for row in rows if row[4] is not None]
    numel = sum(row[6] or 0 for row in rows)
    zeros = [row[5] for row in rows]  # not known of runs that were imported from tools that do not count them
    return Line(
        place=place,
        kind=kind,
        names=len({row[1] for row in rows}),
        tensors=sum(row[2] for row in rows),
        absmax=max(largest, default=None),
        norm=sum(squares) ** 0.5 if squares else None,
        zeros=sum(zeros) / numel if numel and None not in zeros else None,
        non_finite=sum(row[7] or 0 for row in rows),
        replicas_agree=all(row[8] for row in rows),
    )


def _outside(kind: str, name: str) -> str:
    return "loss" if kind == "loss" else name.partition(".")[0]


def _order(layer: int | None, name: str) -> int:
    """Execution order of the parts of a model: embedding, layers, what follows them."""
    if layer is not None:
        return 10 + layer
    return 0 if name.startswith(("model", "embedding", "rotary")) else 1_000_000


def _expects_rows(run: Run) -> bool:
    """Whether there should be rows: a flight recorder and checks write none as long as nothing happens."""
    asked = run.facts.get("probe", {}).get("content", {})
    if "monitor" in asked or not {"checks", "recorder"} & set(asked):
        return True
    return "dump" in asked and asked.get("steps") != "none"


def warnings(run: Run) -> list[str]:
    """What was asked and did not happen, on any rank; faults; files that are missing."""
    found = list(run.problems)
    expected = run.facts.get("world", 1)
    asked_all = run.facts.get("probe", {}).get("content", {}).get("ranks", "all") == "all"
    if asked_all and len(run.ranks) < expected:
        found.append(f"{len(run.ranks)} of {expected} ranks have written anything")
    found.extend(disagreements(run.ranks))
    patterns: dict[str, int] = {}
    for rank, facts in sorted(run.ranks.items()):
        ledger = facts.get("ledger", {})
        found.extend(f"rank {rank}: fault: {text}" for text in ledger.get("faults", [])[:1])
        found.extend(f"rank {rank}: {text}" for text in ledger.get("not_happened", []))
        if not facts.get("closed", False):
            found.append(f"rank {rank}: the job ended without closing the run; steps that are here are whole")
        written = ledger.get("written", {})
        if written.get("rows_dropped") or written.get("steps_dropped"):
            found.append(f"rank {rank}: {written.get('rows_dropped', 0)} rows could not be written")
        if ledger.get("no_room"):
            found.append(
                f"rank {rank}: {ledger['no_room']} tensors were left out; limits.host_memory is too small for them"
            )
        for text in ledger.get("unmatched", []):
            patterns[text] = patterns.get(text, 0) + 1
    found.extend(
        f"dump.list: {text!r} matched nothing on any rank" for text, n in patterns.items() if n == len(run.ranks)
    )
    known = "\n".join(found)
    faults = [fault for text in found if (fault := text.partition(": fault: ")[2])]
    for event in read_events(run.path):
        text = str(event.get("text", event.get("event", "")))
        # What the flight recorder wrote is no problem; the alert that made it write is told.
        # What perturb found is ranked by diagnose.
        if event.get("event") in ("not_happened", "recorder", "perturb") or not text or text in known:
            continue
        # A rank that was killed has left its fault here alone.
        if event.get("event") != "fault" or not any(fault in text for fault in faults):
            found.append(f"rank {event.get('rank')}: {text}")
    return found
