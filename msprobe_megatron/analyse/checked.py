"""What a run directory says of itself, held against what it should look like.

Run directories travel: they may be cut off, damaged, or made by somebody else. Readers below this file may rely on the
types that are checked here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class RunError(Exception):
    """A directory that cannot be read as a run; the text says what is wrong with which file."""


_LARGEST = 256 << 20
# key -> type; keys that are absent are fine, older and imported runs have fewer.
_RUN: dict[str, type | tuple[type, ...]] = {
    "world": int,
    "sizes": dict,
    "versions": dict,
    "environment": dict,
    "sources": dict,
    "arguments": dict,
    "ranks": list,
    "probe": dict,
    "recompute": dict,
    "gradient_scale": (int, float, type(None)),
}
_RANK: dict[str, type | tuple[type, ...]] = {
    **{"coordinates": dict, "chunks": list, "ledger": dict, "closed": bool, "own": dict}
}
_OWN: dict[str, type | tuple[type, ...]] = {"versions": dict, "probe": str, "clock": int}
_LEDGER: dict[str, type | tuple[type, ...]] = {
    **{key: list for key in ("faults", "not_happened", "unmatched", "steps", "patches", "schedules")},
    **{key: dict for key in ("written", "fired", "bound", "asked")},
}
_LINE = {"id", "phase", "state", "fired", "reason", "why"}  # of the patches in a ledger
_MAGIC = b"PAR1"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; RunError names the file and what is wrong."""
    try:
        if path.stat().st_size > _LARGEST:
            raise RunError(f"{path}: {path.stat().st_size} bytes; accepted: at most {_LARGEST}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read: {str(error)[:200]}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path}: expected a JSON object")
    return content


def run_facts(path: Path) -> dict[str, Any]:
    """run.json, its types checked."""
    facts = read_json(path)
    _check(facts, _RUN, path, "")
    for axis, size in facts.get("sizes", {}).items():
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 1 << 24:
            raise RunError(f"{path}: sizes.{axis}: {str(size)[:40]!r}; expected a size from 1")
    if not all(isinstance(entry, dict) for entry in facts.get("ranks", [])):
        raise RunError(f"{path}: ranks: expected a list of objects")
    content = facts.get("probe", {}).get("content", {})
    if not isinstance(content, dict):
        raise RunError(f"{path}: probe.content: expected an object")
    return facts


def rank_facts(path: Path) -> dict[str, Any]:
    """A rank's file, its types checked."""
    facts = read_json(path)
    _check(facts, _RANK, path, "")
    _check(facts.get("ledger", {}), _LEDGER, path, "ledger.")
    _check(facts.get("own", {}), _OWN, path, "own.")
    if not all(isinstance(line, dict) and line.keys() >= _LINE for line in facts.get("ledger", {}).get("patches", [])):
        raise RunError(f"{path}: ledger.patches: expected lines with {', '.join(sorted(_LINE))}")
    return facts


def rows_problem(path: Path) -> str | None:
    """Why a file of rows cannot be opened, from its two ends; None when it looks whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(4)
            file.seek(max(0, size - 4))
            tail = file.read(4)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if size >= 12 and head == tail == _MAGIC else "is not a whole Parquet file"


def _check(content: dict[str, Any], types: dict[str, Any], path: Path, prefix: str) -> None:
    for key, kind in types.items():
        value = content.get(key)
        wrong_number = isinstance(value, bool) and kind is int
        if key in content and (not isinstance(value, kind) or wrong_number):
            raise RunError(f"{path}: {prefix}{key}: {str(value)[:40]!r} is not what a run writes there")
