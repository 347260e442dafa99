"""Scaling on this machine: seed 004's table for 1, 2, 4 … data-parallel processes of the demo job.

Each is a job under the monitor; the table is made of their throughput rows, as `msprobe-megatron scaling` makes it of
any finished runs. Under torchrun on several nodes, run the job yourself with `monitor:` and give its runs to `scaling`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from msprobe_megatron.lab.bench.clockwork.processes import run_ranks
from msprobe_megatron.lab.bench.clockwork.turns import BenchFailed
from msprobe_megatron.lab.bench.options import Options

ABOUT = (
    "Local batch fixed, data parallel; median of the seconds between steps of the slowest rank. Processes that share"
    " the cores of one machine cannot be faster than the cores: efficiency beyond their number says nothing."
)
_FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --micro-batch-size 1 --swiglu"
    " --normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
)
_STEPS, _LEAST = 24, 6


def bench(options: Options) -> list[dict[str, Any]]:
    """A line for each number of processes."""
    from msprobe_megatron.analysis.diagnose.throughput import scaling
    from msprobe_megatron.analysis.load.run import open_run

    if options.model is not None and not options.model.startswith("--"):
        raise BenchFailed(f"--model {options.model!r}: accepted are flags of Megatron, such as {_FLAGS[:16]} …")
    most = options.ranks or 4
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count <= most]
    folders = []
    for count in counts:
        options.progress(f"scaling: {count} processes")
        folders.append(
            run_job(
                options.out / f"scaling_{count}", count, max(_LEAST, options.turns or _STEPS), options.model or _FLAGS
            )
        )
    lines = scaling([open_run(folder) for folder in folders])
    # As low as every one of them came: that many processes took so long to get there.
    reached = max((line.last_loss for line in lines if line.last_loss is not None), default=None)
    lines = scaling([open_run(folder) for folder in folders], reached)
    return [
        {
            "name": f"processes:{line.cards}",
            "local_batch": line.local_batch,
            "global_batch": line.global_batch,
            "workers": line.workers,
            "iter/s": line.iterations_per_second,
            "samples/s": line.samples_per_second,
            "speedup": line.speedup,
            "efficiency": line.efficiency,
            "loss": line.last_loss,
            f"seconds_to_{'loss' if reached is None else f'{reached:.2f}'}": line.seconds_to_loss,
            "median_s": 1 / line.iterations_per_second,
            "peak_bytes": line.memory_bytes,
        }
        for line in lines
    ]


def run_job(folder: Path, processes: int, steps: int, model: str = _FLAGS) -> Path:
    """Train the demo job over `processes` data-parallel processes under the monitor; returns the run directory."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    probe = folder.with_suffix(".yaml")
    probe.write_text(
        "monitor: {activations: false, gradients: false, optimizer: false, data: true}\n", encoding="utf-8"
    )
    flags = f"{model} --global-batch-size {2 * processes} --train-iters {steps} --log-interval 1000000"
    command = [sys.executable, "-m", "msprobe_megatron.demo.pretrain_gpt", *flags.split()]
    command += ["--msprobe-config", str(probe), "--msprobe-output", str(folder)]
    run_ranks(command, processes, "bench scaling")
    return folder
