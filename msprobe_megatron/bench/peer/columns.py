"""Our figure and the peer's for the same plain model: processes of both tools, and of none, in turn.

The peer cannot be taken out of a process once it is in, so that here every turn is a process; the first steps of each
are not counted. Lines are named ``plain_torch:<size>:<variant>`` to keep them apart from those of Megatron.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msprobe_megatron.bench.options import Options

_WORKER = Path(__file__).with_name("worker.py")
_PATIENCE_SECONDS = 900


@dataclass(frozen=True)
class Pair:
    """A variant in both tools; `peer_tool` is one of the worker's."""

    name: str
    ours: dict[str, Any]
    peer: dict[str, Any]
    peer_tool: str = "msprobe"


class PeerFailed(Exception):
    """A process of a bench ended badly; the text says which and why."""


def columns(
    size: str, pairs: Sequence[Pair], options: Options, steps: int = 10, rounds: int = 3
) -> list[dict[str, Any]]:
    """A line for each pair: ours and the peer's ratio to no tool.

    Example::

        columns("h64", [Pair("L0", {"dump": {"level": "L0"}}, {"task": "statistics", "level": "L0"})], options)
    """
    if options.peer_python is None:
        return []
    rounds = options.turns or rounds
    times: dict[str, list[float]] = {}
    last: dict[str, dict[str, Any]] = {}
    work: list[tuple[str, str, str, dict[str, Any]]] = [("none", sys.executable, "none", {})]
    for pair in pairs:
        work.append((f"ours {pair.name}", sys.executable, "ours", pair.ours))
        work.append((f"peer {pair.name}", options.peer_python, pair.peer_tool, pair.peer))
    for turn in range(rounds):
        for key, python, tool, config in work:
            options.progress(f"plain torch {size}: {key}, turn {turn + 1} of {rounds}")
            # The peer refuses paths with a plus sign.
            folder = options.out / "plain_torch" / re.sub(r"\W", "_", f"{size}_{key}_{turn}")
            task = {"tool": tool, "size": size, "steps": steps, "folder": str(folder), "config": config}
            last[key] = run_worker(python, task)
            times.setdefault(key, []).append(statistics.median(last[key]["times"]))
    base = statistics.median(times["none"])
    lines = []
    for pair in pairs:
        ours, peer = (statistics.median(times[f"{who} {pair.name}"]) for who in ("ours", "peer"))
        lines.append(
            {
                "name": f"plain_torch:{size}:{pair.name}",
                "ratio": ours / base,
                "peer_ratio": peer / base,
                "median_s": ours,
                "bytes": last[f"ours {pair.name}"]["bytes"],
                "files": last[f"ours {pair.name}"]["files"],
                "peer_bytes": last[f"peer {pair.name}"]["bytes"],
                "peer_files": last[f"peer {pair.name}"]["files"],
            }
        )
    return lines


def run_worker(python: str, task: dict[str, Any]) -> dict[str, Any]:
    """Run one process of the worker and return what it measured.

    Example::

        run_worker(sys.executable, {"tool": "none", "size": "h64", "steps": 3, "folder": "out", "config": {}})
    """
    folder = Path(task["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f"{folder.name}_task.json"
    path.write_text(json.dumps(task), encoding="utf-8")
    done = subprocess.run(
        [python, str(_WORKER), str(path)], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise PeerFailed(f"bench: {python}: {task['tool']} {task['config']}: {done.stderr.strip()[-1500:]}") from None
    return found
