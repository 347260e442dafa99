"""A bench over several processes: the same turns in all of them, one table out of their tables.

Each process trains its rank of the demo job with the same variants in the same order and leaves its lines as JSON;
`ratio` of the whole is that of the sums of CPU time, `training_ratio` that of the slowest rank, which is what a job
waits for.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, BinaryIO

from msprobe_megatron.lab.bench.clockwork.turns import BenchFailed, Progress, Variants, Workload, silent

_PATIENCE_SECONDS = 1800
_GRACE_SECONDS = 60
"""How long the other ranks have to notice that one is gone, and to say what they have to say."""
_LOOK_SECONDS = 0.05
_LAST_WORDS = 2000
_FIRST_PORT, _PORTS = 10000, 10000


def measure_in_processes(
    workload: Workload,
    variants: Variants,
    out: Path,
    ranks: int,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Run `workload` over `ranks` processes of this machine."""
    out.mkdir(parents=True, exist_ok=True)
    progress(f"{workload.name}: {ranks} processes")
    task = {
        "workload": list(astuple(workload)),
        "variants": {name: dict(variant) for name, variant in variants.items()},
        "out": str(out),
    }
    path = out / f"{workload.name}_task.json"
    path.write_text(json.dumps(task), encoding="utf-8")
    run_ranks(
        [sys.executable, "-m", "msprobe_megatron.lab.bench.clockwork.processes", str(path)],
        ranks,
        f"bench {workload.name}",
    )
    tables = [json.loads(_result_file(path, rank).read_text(encoding="utf-8")) for rank in range(ranks)]
    return together(tables)


def run_ranks(command: Sequence[str], ranks: int, what: str, patience: float = _PATIENCE_SECONDS) -> None:
    """Run a command once a rank, as torchrun would on one machine; raises with the end of what failed ones said."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
    shared.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    with contextlib.ExitStack() as stack:
        jobs: list[subprocess.Popen[bytes]] = []
        # Files, not pipes: a rank that says much would wait for its reader, and all others for that rank.
        words = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        try:
            for rank, said in enumerate(words):
                env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                jobs.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=said))
            ended = _wait(jobs, patience)
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        ends = [f"rank {rank} ended with {code}: {_last_words(words[rank])}" for rank, code in ended.items() if code]
        ends += [f"rank {rank} did not end: {_last_words(words[rank])}" for rank in range(ranks) if rank not in ended]
    if ends:
        raise BenchFailed(f"{what}: " + "\n".join(ends))


def _wait(jobs: Sequence[subprocess.Popen[bytes]], patience: float) -> dict[int, int]:
    """Exit codes by rank, the first to end first: what those after it say is often only that it is gone."""
    ended: dict[int, int] = {}
    last = time.monotonic() + patience
    while len(ended) < len(jobs) and time.monotonic() < last:
        for rank, job in enumerate(jobs):
            code = job.poll() if rank not in ended else None
            if code is not None:
                ended[rank] = code
                last = min(last, time.monotonic() + _GRACE_SECONDS) if code else last
        time.sleep(_LOOK_SECONDS)
    return ended


def _last_words(said: BinaryIO) -> str:
    said.seek(0)
    return said.read()[-_LAST_WORDS:].decode("utf-8", "replace").strip()


def _free_port() -> int:
    """A port below those that the system hands out to connections: one of theirs may be gone before it is used."""
    for attempt in range(_PORTS):
        port = _FIRST_PORT + (os.getpid() * 37 + attempt) % _PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise BenchFailed(f"no free port from {_FIRST_PORT} to {_FIRST_PORT + _PORTS - 1} on 127.0.0.1")


def together(tables: list[list[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One table out of those of all ranks."""
    lines: list[dict[str, Any]] = []
    without = [float(table[0]["median_s"]) for table in tables]
    for of_ranks in zip(*tables, strict=True):
        rows = sum(line["rows"] for line in of_ranks)
        line = dict(of_ranks[0])
        line.update(
            median_s=sum(other["median_s"] for other in of_ranks),
            ratio=sum(base * other["ratio"] for base, other in zip(without, of_ranks, strict=True)) / sum(without),
            training_ratio=max(other["training_ratio"] for other in of_ranks),
            uncertainty=max(other["uncertainty"] for other in of_ranks),
            spread=max(other["spread"] for other in of_ranks),
            peak_bytes=max(other["peak_bytes"] for other in of_ranks),
            memory_ratio=max(other["memory_ratio"] for other in of_ranks),
            extra_bytes=max(other["extra_bytes"] for other in of_ranks),
            least_ratio=max(other["least_ratio"] for other in of_ranks),
            # Every rank looked at the same directory when its turn ended; the last one saw the most.
            bytes=max(other["bytes"] for other in of_ranks),
            files=max(other["files"] for other in of_ranks),
            rows=rows,
            ranks=len(of_ranks),
        )
        lines.append(line)
    return lines


def _result_file(task: Path, rank: int) -> Path:
    return task.with_name(f"{task.stem}_rank_{rank}.json")


def _work(path: Path) -> None:
    from msprobe_megatron.lab.bench.clockwork.turns import measure

    task = json.loads(path.read_text(encoding="utf-8"))
    results = measure(Workload(*task["workload"]), task["variants"], Path(task["out"]))
    text = json.dumps([result.as_dict() for result in results])
    _result_file(path, int(os.environ["RANK"])).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
