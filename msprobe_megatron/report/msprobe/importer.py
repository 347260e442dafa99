"""Reading msprobe dumps into a run directory, so that `summary` and `compare` work on them.

Statistics become sums again as far as msprobe kept them: Mean and Norm give sum and sumsq, Max and Min stay. What it
did not count (zeros, how many NaN) stays unknown. Files are treated as data from strangers: JSON only, sizes limited.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.run_directory.schema import Row
from msprobe_megatron.run_directory.table import build_table

_STEP, _RANK = re.compile(r"step([0-9]+)$"), re.compile(r"rank([0-9]+)$")
_MODULE = re.compile(r"Module\.(?:([0-9]{1,9})\.)?(.+)\.([^.]+)\.(forward|backward)\.([0-9]{1,9})$")
_GRADIENT = re.compile(r"Module\.(?:([0-9]{1,9})\.)?(.+)\.([^.]+)\.parameters_grad(?:\.[0-9]+)?$")
_API = re.compile(r"([A-Za-z]\w*)\.(.+)\.([0-9]{1,9})\.(forward|backward)$")
_LARGEST = 4 << 30
_MOST_RANKS, _MOST_STEPS, _MOST_ELEMENTS = 1 << 15, 1 << 53, 1 << 62
_DEEPEST = 32


class MsprobeFormatError(Exception):
    """A directory that cannot be read as msprobe dumps; the text names the file and what is wrong."""


class _Name(NamedTuple):
    kind: str
    name: str
    op: str
    vpp: int
    call: int
    backward: bool


def import_msprobe(source: str | Path, out: str | Path) -> dict[str, int]:
    """Turn a msprobe dump path (it holds ``step*/rank*/dump.json``) into a run directory; returns counts."""
    files = list(_files(Path(source)))
    if not files:
        raise MsprobeFormatError(f"{source}: no step*/rank*/dump.json; expected the dump_path of msprobe")
    if not any(_table(_read(path).get("data", {}), path)[0] for _, _, path in files):
        raise MsprobeFormatError(f"{source}: no tensor in any of {len(files)} dump.json; nothing was imported")
    directory = RunDirectory.create(Path(out))
    ranks = sorted({rank for _, rank, _ in files})
    for rank in ranks:
        directory.claim_rank(rank)
    total = 0
    for step, rank, path in files:
        content = _read(path)
        rows, floats, counts = _table(content.get("data", {}), path)
        total += len(rows)
        identity = {"rank": rank, **dict.fromkeys(("tp", "pp", "cp", "ep", "etp"), 0), "dp": rank}
        table = build_table(step, rows, floats, counts, identity)
        folder = f"step_{step:06d}/rank_{rank:05d}"
        directory.write_json(f"{folder}/sites.json", {"step": step, "modules": []})
        directory.write_table(f"{folder}/records.parquet", table)
    world = max(ranks) + 1
    sizes = {**dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "vpp"), 1), "dp": world, "edp": world}
    directory.write_json(
        "run.json",
        {"format": 1, "imported_from": "msprobe", "world": world, "sizes": sizes, "versions": {}, "arguments": {}},
    )
    steps = sorted({step for step, _, _ in files})
    for rank in ranks:
        directory.write_json(f"ranks/rank_{rank:05d}.json", {"closed": True, "ledger": {"steps": steps}})
    return {"steps": len(steps), "ranks": len(ranks), "rows": total}


def _files(source: Path) -> Iterator[tuple[int, int, Path]]:
    for path in sorted(source.glob("step*/rank*/dump.json")):
        step, rank = _STEP.search(path.parent.parent.name), _RANK.search(path.parent.name)
        if not step or not rank:
            continue
        if len(step[1]) > 16 or int(step[1]) >= _MOST_STEPS or len(rank[1]) > 8 or int(rank[1]) >= _MOST_RANKS:
            raise MsprobeFormatError(f"{path}: steps below {_MOST_STEPS} and ranks below {_MOST_RANKS} are accepted")
        yield int(step[1]), int(rank[1]), path


def _read(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _LARGEST:
        raise MsprobeFormatError(f"{path}: {path.stat().st_size} bytes; accepted: at most {_LARGEST}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise MsprobeFormatError(f"{path}: not JSON: {str(error)[:200]}") from error
    if not isinstance(content, dict) or not isinstance(content.get("data", {}), dict):
        raise MsprobeFormatError(f"{path}: expected an object with 'data'")
    return content


def _table(data: dict[str, Any], path: Path) -> tuple[list[Row], Any, Any]:
    rows: list[Row] = []
    floats: list[list[float]] = []
    counts: list[list[int]] = []
    for entry, record in data.items():
        name = _parse(entry)
        if name is None or not isinstance(record, dict):
            continue
        for io, inner, tensor in _tensors(record, name):
            shape = _shape(tensor.get("shape"), entry, path)
            numel = math.prod(shape)
            figures = _figures(tensor, numel)
            rows.append(_row(len(rows), name, io, inner, tensor, shape, numel, len(floats)))
            floats.append(figures[0])
            counts.append(figures[1])
    return rows, np.array(floats, np.float64).reshape(-1, 5), np.array(counts, np.int64).reshape(-1, 4)


def _shape(value: Any, entry: str, path: Path) -> tuple[int, ...]:
    sizes = value if isinstance(value, list) else [None]
    if all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < _MOST_ELEMENTS for n in sizes):
        shape = tuple(sizes)
        if len(shape) <= _DEEPEST and math.prod(shape) < _MOST_ELEMENTS:
            return shape
    raise MsprobeFormatError(f"{path}: {entry[:80]!r}: shape {str(value)[:60]!r}; expected a list of sizes")


def _parse(entry: str) -> _Name | None:
    match = _MODULE.match(entry)
    if match:
        backward = match[4] == "backward"
        return _Name(
            "gradient" if backward else "activation", match[2], match[3], int(match[1] or 0), int(match[5]), backward
        )
    match = _GRADIENT.match(entry)
    if match:
        return _Name("grad_reduced", match[2], match[3], int(match[1] or 0), 0, True)
    match = _API.match(entry)
    if match:
        backward = match[4] == "backward"
        return _Name(
            "gradient" if backward else "activation", f"{match[1]}.{match[2]}", match[2], 0, int(match[3]), backward
        )
    return None


def _tensors(record: dict[str, Any], name: _Name) -> Iterator[tuple[str, str, dict[str, Any]]]:
    if name.kind == "grad_reduced":
        for parameter, values in record.items():
            for tensor in values if isinstance(values, list) else [values]:
                yield from ((f"weight:{parameter}", "", t) for _, t in _leaves(tensor, ""))
        return
    # msprobe's backward "input" is the gradient of our output, and the other way round.
    sides = {"input": "output", "output": "input"} if name.backward else {}
    for key, value in record.items():
        if key == "parameters" and isinstance(value, dict):
            # Every call repeats them; they do not change within a step.
            own = value.items() if name.call == 0 else ()
            yield from ((f"parameter:{parameter}", "", t) for parameter, t in own if isinstance(t, dict))
            continue
        io = "output" if key == "output" else "input"
        for inner, tensor in _leaves(value, ""):
            yield sides.get(io, io), inner, tensor


def _leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    if depth > _DEEPEST:
        return
    if isinstance(value, dict):
        if "dtype" in value and "shape" in value:
            yield path, value
            return
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else str(key), depth + 1)


def _figures(tensor: dict[str, Any], numel: int) -> tuple[list[float], list[int]]:
    high, low, mean, norm = (_number(tensor.get(key)) for key in ("Max", "Min", "Mean", "Norm"))
    nan = int(any(math.isnan(value) for value in (high, low) if value is not None))
    posinf, neginf = int(high == math.inf), int(low == -math.inf)
    low_f, high_f = _finite(low), _finite(high)
    total = _finite(mean) * numel if mean is not None and math.isfinite(mean) else math.nan
    squares = norm * norm if norm is not None and math.isfinite(norm) else math.nan
    largest = max(abs(low_f), abs(high_f))
    # -1 is "not known" to the table: msprobe says that there is a NaN, never how many, and counts no zeros.
    return [low_f, high_f, total, squares, largest], [nan, posinf, neginf, -1]


def _text(value: Any) -> str:
    """Text that a column can hold: JSON may carry halves of characters."""
    return str(value).encode("utf-8", "replace").decode()


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan


def _row(
    seq: int, name: _Name, io: str, inner: str, tensor: dict[str, Any], shape: tuple[int, ...], numel: int, slot: int
) -> Row:
    side, _, parameter = io.partition(":")
    kind = "parameter" if side == "parameter" else name.kind
    full = f"{name.name}.{parameter}" if parameter else name.name
    phase = "optimizer" if parameter else "backward" if name.backward else "forward"
    dtype = _text(tensor.get("dtype", "")).removeprefix("torch.")
    return Row(
        seq=seq,
        microbatch=None if parameter else name.call,
        phase=phase,
        vpp=name.vpp,
        kind=kind,
        name=_text(full),
        io="weight" if parameter else side,
        path=_text(inner),
        op=_text(name.op),
        site=-1,
        dtype=dtype,
        shape=shape,
        global_shape=None,
        shard="?imported from msprobe, which keeps no layout",
        numel=numel,
        slot=slot,
    )
