"""A small training for trust tests, and ways to hurt it."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tests.support.forked import prepare, run_forked

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
    from msprobe_megatron.lab.demo.pretrain_gpt import run

    if prepare_rank is not None:
        prepare_rank()
    return trained(run(argv))


def trained(result: Any) -> dict[str, Any]:
    """Every number of a finished training that the kit must not change."""
    return {"losses": result.losses, "parameters": [p.detach().clone() for c in result.chunks for p in c.parameters()]}


def same(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Assert that two trainings gave the same bits."""
    assert left["losses"] == right["losses"]
    assert all(torch.equal(a, b) for a, b in zip(left["parameters"], right["parameters"], strict=True))


def on_disk(paths: Iterable[Path]) -> int:
    """Bytes of files, those that have several names once."""
    return sum({found.st_ino: found.st_size for found in (path.stat() for path in paths)}.values())


def plain(iterations: int, extra: str = "", world: int = 1) -> list[dict[str, Any]]:
    """The same training without the kit."""
    return run_forked(world, train, flags(iterations, extra=extra))


_OPERATIONS = {"open", "os.rename", "os.mkdir", "os.link", "os.remove", "os.fsync"}


def started_quietly(
    argv: list[str], prepare_rank: Callable[[], None] | None = None, at_end: Callable[[], Any] = lambda: None
) -> int:
    """Start the training in a process of its own, which says nothing; its id.

    It has the signal handlers of this process: by default SIGTERM ends it without a word, as SIGKILL does.
    """
    prepare()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            train(argv, prepare_rank)
            at_end()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            os._exit(code)
    return pid


def killed_at_operation(argv: list[str], number: int | None, told: Path) -> int:
    """Let the training kill itself at a file operation, or count them into `told` if `number` is None; how it ended.

    A file that is made, linked or renamed, a directory that is made, and every wait for the disk is one.
    """
    last = [0]

    def prepare_rank() -> None:
        count, fsync = itertools.count(1), os.fsync

        def passed(event: str, args: Any = ()) -> None:
            read_only = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if event in _OPERATIONS and not read_only:
                last[0] = next(count)
                if last[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        def synced(descriptor: int) -> None:
            passed("os.fsync")
            fsync(descriptor)

        os.fsync = synced
        sys.addaudithook(passed)

    pid = started_quietly(argv, prepare_rank, lambda: told.write_text(str(last[0])))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at_random(argv: list[str], seed: int, longest: float, how: int = signal.SIGKILL) -> int:
    """Send the training a signal at a moment that `seed` picks; how it ended."""
    pid = started_quietly(argv)
    time.sleep(random.Random(seed).uniform(0.05, longest))
    os.kill(pid, how)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
