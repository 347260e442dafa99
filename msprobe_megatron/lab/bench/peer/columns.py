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

from msprobe_megatron.lab.bench.clockwork.paired import spread
from msprobe_megatron.lab.bench.options import Options

_PATIENCE_SECONDS = 600


@dataclass(frozen=True)
class Pair:
    """A variant in both tools; `peer_tool` is one of the worker's."""

    name: str
    ours: dict[str, Any]
    peer: dict[str, Any]
    peer_tool: str = "msprobe"


class PeerFailed(Exception):
    """A process of a bench ended badly; the text says which and why."""


def check_peer(python: str) -> str:
    """The version of mindstudio-probe that an interpreter has; raises where there is none, before an hour is spent."""
    ask = "import importlib.metadata as m, torch; print(m.version('mindstudio-probe'))"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=300, check=False)
    except OSError as error:
        raise PeerFailed(f"--peer-python: {python} cannot be run ({error.strerror}); name an interpreter") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise PeerFailed(
            f"--peer-python: {python} has no torch with mindstudio-probe ({reason});"
            " scripts/bench_peer.sh makes an environment that has"
        )
    return done.stdout.strip()


def columns(
    size: str, pairs: Sequence[Pair], options: Options, steps: int = 8, rounds: int = 3
) -> list[dict[str, Any]]:
    """A line for each pair: ours and the peer's ratio to no tool; a peer that fails has its last words instead."""
    if options.peer_python is None:
        return []
    work: dict[str, tuple[str, str, dict[str, Any]]] = {"none": (sys.executable, "none", {})}
    for pair in pairs:
        work[f"ours {pair.name}"] = (sys.executable, "ours", pair.ours)
        work[f"peer {pair.name}"] = (options.peer_python, pair.peer_tool, pair.peer)
    found: dict[str, list[dict[str, Any]]] = {key: [] for key in work}
    failed: dict[str, str] = {}
    rounds = options.turns or rounds
    for turn in range(rounds):
        for at, (key, (python, tool, config)) in enumerate(work.items()):
            options.progress(f"plain torch {size}: {key}", (turn + at / len(work)) / rounds)
            # The peer refuses paths with a plus sign.
            folder = options.out / "plain_torch" / re.sub(r"\W", "_", f"{size}_{key}_{turn}")
            task = {"tool": tool, "size": size, "steps": steps, "folder": str(folder), "config": config}
            try:
                if key not in failed:
                    found[key].append(run_worker(python, task))
            except PeerFailed as error:
                if not key.startswith("peer "):
                    raise
                failed[key] = str(error)
    return [_line(size, pair.name, found, failed) for pair in pairs]


def _line(size: str, name: str, found: dict[str, list[dict[str, Any]]], failed: dict[str, str]) -> dict[str, Any]:
    times = {key: [statistics.median(one["times"]) for one in all_of] for key, all_of in found.items()}
    base, ours = statistics.median(times["none"]), statistics.median(times[f"ours {name}"])
    last, steps = found[f"ours {name}"][-1], [t for one in found[f"ours {name}"] for t in one["times"]]
    line = {
        "name": f"plain_torch:{size}:{name}",
        "ratio": ours / base,
        "median_s": ours,
        "spread": spread(steps),
        "peak_bytes": last["peak_bytes"],
        "memory_ratio": last["peak_bytes"] / (found["none"][-1]["peak_bytes"] or 1),
        **{key: last[key] for key in ("bytes", "files")},
        **{"peer_ratio": None, "peer_peak_bytes": None, "peer_bytes": None, "peer_files": None},
    }
    if f"peer {name}" in failed:
        line["peer_error"] = " ".join(failed[f"peer {name}"].split())[-160:]
    else:
        peer = found[f"peer {name}"][-1]
        line |= {f"peer_{key}": peer[key] for key in ("peak_bytes", "bytes", "files")}
        line["peer_ratio"] = statistics.median(times[f"peer {name}"]) / base
    return line


def run_worker(python: str, task: dict[str, Any], worker: str = "worker.py") -> dict[str, Any]:
    """Run one process of a worker of this folder and return what it measured."""
    folder = Path(task["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f"{folder.name}_task.json"
    path.write_text(json.dumps(task), encoding="utf-8")
    what = f"bench: {python}: {task['tool']} {task['config']}"
    try:
        done = subprocess.run(
            [python, str(Path(__file__).with_name(worker)), str(path)],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerFailed(f"{what}: not done after {_PATIENCE_SECONDS} s") from None
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise PeerFailed(f"{what}: {done.stderr.strip()[-1500:]}") from None
    return found
