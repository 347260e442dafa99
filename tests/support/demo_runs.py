"""Small recorded runs of the demo job, for tests that read run directories."""

from __future__ import annotations

from pathlib import Path

from tests.jobs.compare import faults
from tests.support.forked import run_forked

TINY = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --attention-dropout 0 --hidden-dropout 0"
    " --msprobe-device cpu"
)


def demo_run(folder: Path, probe: str, flags: str, *, world: int = 1, fault: str = "none", name: str = "out") -> Path:
    """Train in forked ranks with this text as the probe file; returns the run directory, folder/name.

    Example::

        demo_run(tmp_path, "dump: {level: mix}", "--num-layers 4 --train-iters 1 --micro-batch-size 2", world=2)
    """
    file, out = folder / f"{name}.yaml", folder / name
    file.write_text(probe, encoding="utf-8")
    argv = [*TINY.split(), *flags.split(), "--msprobe-config", str(file), "--msprobe-output", str(out)]
    run_forked(world, faults.train, argv, fault)
    return out
