"""A bench over several processes: the same turns in all of them, one table out of their tables.

Each process trains its rank of the demo job with the same variants in the same order and leaves its lines as JSON;
`ratio` of the whole is that of the sums of CPU time, `training_ratio` that of the slowest rank, which is what a job
waits for.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from msprobe_megatron.bench.turns import BenchFailed, Progress, Variants, Workload, silent

_PATIENCE_SECONDS = 1800
_LAST_WORDS = 2000


def measure_in_processes(
    workload: Workload,
    variants: Variants,
    out: Path,
    ranks: int,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Run `workload` over `ranks` processes of this machine.

    Example::

        measure_in_processes(workload_with_tp2, variants, Path("bench_out"), ranks=2)
    """
    out.mkdir(parents=True, exist_ok=True)
    progress(f"{workload.name}: {ranks} processes")
    task = {
        "workload": list(astuple(workload)),
        "variants": {name: dict(variant) for name, variant in variants.items()},
        "out": str(out),
    }
    path = out / f"{workload.name}_task.json"
    path.write_text(json.dumps(task), encoding="utf-8")
    run_ranks([sys.executable, "-m", "msprobe_megatron.bench.processes", str(path)], ranks, f"bench {workload.name}")
    tables = [json.loads(_result_file(path, rank).read_text(encoding="utf-8")) for rank in range(ranks)]
    return together(tables)


def run_ranks(command: Sequence[str], ranks: int, what: str) -> None:
    """Run a command once a rank, as torchrun would on one machine; raises with the end of what a failed one said.

    Example::

        run_ranks([sys.executable, "train.py"], ranks=2, what="bench scaling")
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    jobs = []
    for rank in range(ranks):
        env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        jobs.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    try:
        ends = [job.communicate(timeout=_PATIENCE_SECONDS)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    # All that failed: what most of them say is only that another one is gone.
    failed = [
        f"rank {rank} ended with {job.returncode}: {text[-_LAST_WORDS:]}"
        for rank, (job, text) in enumerate(zip(jobs, ends, strict=True))
        if job.returncode
    ]
    if failed:
        raise BenchFailed(f"{what}: " + "\n".join(failed))


def together(tables: list[list[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One table out of those of all ranks.

    Example::

        together([[{"name": "plain", "median_s": 1.0, …}], [{"name": "plain", "median_s": 3.0, …}]])[0]["median_s"]
        # 4.0
    """
    lines: list[dict[str, Any]] = []
    for of_ranks in zip(*tables, strict=True):
        total = sum(line["median_s"] for line in of_ranks)
        rows = sum(line["rows"] for line in of_ranks)
        line = dict(of_ranks[0])
        line.update(
            median_s=total,
            ratio=total / lines[0]["median_s"] if lines else 1.0,
            training_ratio=max(other["training_ratio"] for other in of_ranks),
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
    from msprobe_megatron.bench.turns import measure

    task = json.loads(path.read_text(encoding="utf-8"))
    results = measure(Workload(*task["workload"]), task["variants"], Path(task["out"]))
    text = json.dumps([result.as_dict() for result in results])
    _result_file(path, int(os.environ["RANK"])).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
