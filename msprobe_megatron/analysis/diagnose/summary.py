"""Summary of a run: rows by layer and kind, and warnings: unfulfilled requests, faults, ranks set up differently.

Each rank records its own versions, probe file and clock; nothing compares them while the job runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from msprobe_megatron.analysis.compare.merge import merged
from msprobe_megatron.analysis.load.run import Run, RunError, steps_of
from msprobe_megatron.run_directory.directory import read_events
from msprobe_megatron.topology.layers import layer_of


@dataclass(frozen=True)
class Line:
    """One line of the table: a layer (or a part of the model outside the layers) and a kind, shards merged."""

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
    """Summary of a run, or of one of its steps."""
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
        if not run.perturb and expects_rows(run):
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
    """Axes larger than 1, without the expert axes that Megatron derives from TP, DP and CP by default."""
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
    zeros = [row[5] for row in rows]  # unknown in runs imported from tools that do not count them
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
    """Execution order of the parts of a model: embedding, layers, output."""
    if layer is not None:
        return 10 + layer
    return 0 if name.startswith(("model", "embedding", "rotary")) else 1_000_000


def expects_rows(run: Run) -> bool:
    """True if the run should have rows: a flight recorder and checks write none as long as nothing happens."""
    sections = run.facts.get("probe", {}).get("content", {})
    if "monitor" in sections or not {"checks", "recorder"} & set(sections):
        return True
    return "dump" in sections and sections.get("steps") != "none"


def warnings(run: Run) -> list[str]:
    """Requests that were not fulfilled on any rank, faults, missing files, ranks that were set up differently."""
    found = list(run.problems)
    expected = run.facts.get("world", 1)
    all_requested = run.facts.get("probe", {}).get("content", {}).get("ranks", "all") == "all"
    if all_requested and len(run.ranks) < expected:
        found.append(f"only {len(run.ranks)} of {expected} ranks wrote anything")
    found.extend(disagreements(run.ranks))
    for rank, facts in sorted(run.ranks.items()):
        found.extend(f"rank {rank}: {text}" for text in _rank_warnings(facts))
    found.extend(_unmatched_patterns(run))
    found.extend(_event_warnings(run, found))
    return found


def _rank_warnings(facts: Mapping[str, Any]) -> Iterator[str]:
    ledger = facts.get("ledger", {})
    yield from (f"fault: {text}" for text in ledger.get("faults", [])[:1])
    yield from ledger.get("not_happened", [])
    if not facts.get("closed", False):
        yield "the job ended without closing the run; the steps that were written are complete"
    written = ledger.get("written", {})
    if written.get("rows_dropped") or written.get("steps_dropped"):
        yield f"{written.get('rows_dropped', 0)} rows could not be written"
    if ledger.get("no_room"):
        yield f"{ledger['no_room']} tensors were not recorded: limits.host_memory is too small for them"


def _unmatched_patterns(run: Run) -> list[str]:
    """Patterns of dump.list that no rank could match; under pipeline parallelism most match on some ranks only."""
    counts = Counter(text for facts in run.ranks.values() for text in facts.get("ledger", {}).get("unmatched", []))
    return [f"dump.list: {text!r} matched nothing on any rank" for text, n in counts.items() if n == len(run.ranks)]


_FAILED_ORDER = ("nothing changes", "no longer read", "it was meant for step")


def _event_warnings(run: Run, found: Sequence[str]) -> list[str]:
    """Events that `found` does not report yet; a rank that was killed has left its fault only here."""
    known = "\n".join(found)
    faults = [fault for text in found if (fault := text.partition(": fault: ")[2])]
    more = []
    for event in read_events(run.path):
        text = str(event.get("text", event.get("event", "")))
        # A dump of the flight recorder is no problem, and the alert that triggered it is reported. `diagnose` ranks
        # the findings of perturb.
        if event.get("event") in ("not_happened", "recorder", "perturb") or not text or text in known:
            continue
        # An order of `ctl` that was carried out is no problem either.
        if event.get("event") == "control" and not any(part in text for part in _FAILED_ORDER):
            continue
        if event.get("event") != "fault" or not any(fault in text for fault in faults):
            more.append(f"rank {event.get('rank')}: {text}")
    return more


_CLOCK_SECONDS = 600
_SHOWN = 8


def disagreements(ranks: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """One sentence per setting in which some ranks differ from the majority.

    Example::

        >>> disagreements({0: {"own": {"probe": "a"}}, 1: {"own": {"probe": "a"}}, 2: {"own": {"probe": "b"}}})
        ['ranks [2]: their probe file differs from that of the other ranks']
    """
    own = {rank: facts["own"] for rank, facts in sorted(ranks.items()) if facts.get("own")}
    packages = sorted({str(name) for facts in own.values() for name in facts.get("versions", {})})
    found = []
    for name in packages:
        versions = {rank: str(facts.get("versions", {}).get(name)) for rank, facts in own.items()}
        for value, most, odd in _odd(versions):
            found.append(f"{_ranks(odd)}: {name} {value}; the other ranks have {most}")
    probes = {rank: str(facts.get("probe", "")) for rank, facts in own.items()}
    found.extend(f"{_ranks(odd)}: their probe file differs from that of the other ranks" for _, _, odd in _odd(probes))
    return [*found, *_clocks({rank: facts["clock"] for rank, facts in own.items() if "clock" in facts})]


def _clocks(clocks: Mapping[int, int]) -> list[str]:
    """Ranks whose clock is far from the median; of two clocks the lowest rank's counts, as in the logs."""
    values = sorted(clocks.values())
    if not values:
        return []
    middle = values[len(values) // 2] if len(values) > 2 else clocks[min(clocks)]
    odd = [rank for rank, clock in clocks.items() if abs(clock - middle) > _CLOCK_SECONDS]
    if not odd:
        return []
    apart = max(abs(clocks[rank] - middle) for rank in odd)
    return [f"{_ranks(odd)}: their clocks, or the times they ended, are {apart} s off; rows carry no timestamps"]


def _odd(values: Mapping[int, str]) -> list[tuple[str, str, list[int]]]:
    """Each minority value with the majority value (of the lowest rank, if there is none) and the ranks that have it."""
    if len(set(values.values())) < 2:
        return []
    most = Counter(values.values()).most_common(1)[0][0]
    others = sorted(set(values.values()) - {most})
    return [(value, most, [rank for rank, mine in values.items() if mine == value]) for value in others]


def _ranks(ranks: list[int]) -> str:
    return f"ranks {ranks[:_SHOWN]}{' …' if len(ranks) > _SHOWN else ''}"
