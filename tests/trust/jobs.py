"""A small training for trust tests, and ways to hurt it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forked import prepare, run_forked

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --global-batch-size 2"
    " --lr 1e-2 --vocab-size 32 --attention-dropout 0 --hidden-dropout 0"
)

EVERYTHING = (Path(__file__).parent / "everything.yaml").read_text()
"""A probe file with every part of the kit on."""


def flags(iterations: int, config: Path | None = None, out: Path | None = None, extra: str = "") -> list[str]:
    """Command line of the training, with the probe or without."""
    argv = f"{FLAGS} --train-iters {iterations} {extra}".split()
    return argv if config is None else [*argv, "--msprobe-config", str(config), "--msprobe-output", str(out)]


def probe_file(folder: Path, text: str = "dump: {level: L0}\n") -> Path:
    """A probe file in `folder`."""
    path = folder / "probe.yaml"
    path.write_text(text)
    return path


def train(argv: list[str], prepare_rank: Callable[[], None] | None = None) -> dict[str, Any]:
    """Train in this rank; returns every number that the kit must not change."""
    from msprobe_megatron.demo.pretrain_gpt import run

    if prepare_rank is not None:
        prepare_rank()
    result = run(argv)
    return {"losses": result.losses, "parameters": [p.detach().clone() for c in result.chunks for p in c.parameters()]}


def plain(iterations: int, extra: str = "", world: int = 1) -> list[dict[str, Any]]:
    """The same training without the kit."""
    return run_forked(world, train, flags(iterations, extra=extra))


def killed_at_random(argv: list[str], seed: int, longest: float, how: int = signal.SIGKILL) -> int:
    """Start the training in a process of its own and send it a signal at a moment that `seed` picks; how it ended.

    The process has the signal's handler of this one: by default SIGTERM ends it without a word, as SIGKILL does.
    """
    prepare()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            train(argv)
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            os._exit(code)
    time.sleep(random.Random(seed).uniform(0.05, longest))
    os.kill(pid, how)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
