"""Reading ``events.jsonl``: alerts, faults and drops of all ranks, in the order they were appended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE_NAME = "events.jsonl"


def read_events(root: Path) -> list[dict[str, Any]]:
    """Return the events of a run directory; none when it has no file of them.

    A last line that was cut off is left out. A broken line before it (two processes on a file system without
    atomic appends) is reported as an event ``unreadable``, so that nothing vanishes silently.

    Example::

        faults = [event for event in read_events(Path("probe_out")) if event["event"] == "fault"]
    """
    try:
        content = (Path(root) / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return []
    found = []
    *lines, last = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        event = _parse(line)
        if event is None:
            text = f"{FILE_NAME}: line {number} is not a JSON object: {line[:80].decode('utf-8', 'replace')!r}"
            event = {"event": "unreadable", "line": number, "text": text}
        found.append(event)
    event = _parse(last)
    return found if event is None else [*found, event]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
