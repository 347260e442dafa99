"""Runs a function in several ranks, forked from this process, which has torch and megatron imported already.

A two-process job then costs one or two seconds instead of ten. Ranks find each other through the environment,
as under torchrun; each gives back a value made of numbers, strings, lists, dicts and tensors.

    def work(flags):
        return run(flags).losses

    first, second = run_forked(2, work, ["--num-layers", "2", ...])
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.support.ports import free_port

# What a job imports anyway; done once here.
_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel.random",
    "megatron.core.rerun_state_machine",
    "msprobe_megatron.lab.demo.train",
)
_LOG_LINES = 40


class RankFailed(AssertionError):
    """A rank raised, died or hung; the message holds its traceback and the end of its output."""


def prepare() -> None:
    """Import torch and megatron with the CPU backend in place; call before anything imports megatron.

    A process that has the simulated device keeps it: tests/support/device.py.
    """
    from msprobe_megatron.hosts.rehearsal import simulated_device
    from msprobe_megatron.job.devices import megatron_on_cpu

    if not simulated_device.installed():
        megatron_on_cpu.install()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _MODULES:
            importlib.import_module(name)


def run_forked(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Call ``function(*args)`` in `world_size` forked ranks; return what they returned, in order of rank."""
    prepare()
    if torch.distributed.is_initialized():
        raise RuntimeError("run_forked: this process has a process group; ranks cannot be forked from it")
    if torch.get_num_threads() != 1:
        raise RuntimeError("run_forked: torch uses several threads here; call torch.set_num_threads(1) first")
    with tempfile.TemporaryDirectory(prefix="ranks_") as name:
        job = _Job(Path(name), world_size)
        try:
            job.start(function, args)
            job.wait(timeout)
        finally:
            job.kill()
        return [torch.load(job.result(rank), weights_only=True) for rank in range(world_size)]


class _Job:
    def __init__(self, directory: Path, world_size: int) -> None:
        self.directory = directory
        self.world_size = world_size
        self.pids: dict[int, int] = {}
        self.pipes: dict[int, int] = {}

    def result(self, rank: int) -> Path:
        return self.directory / f"result_{rank}.pt"

    def log(self, rank: int) -> Path:
        return self.directory / f"log_{rank}.txt"

    def start(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        port = free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(self.world_size):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                _child(self, rank, port, writer, function, args)
            os.close(writer)
            self.pids[rank], self.pipes[rank] = pid, reader

    def wait(self, timeout: float) -> None:
        """Return when all ranks are done; raise as soon as one has failed or time is up."""
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as waiting:
            for rank, pipe in self.pipes.items():
                waiting.register(pipe, selectors.EVENT_READ, rank)
            while waiting.get_map():
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RankFailed(self._hang(timeout))
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    # A rank that dies closes its pipe without a word.
                    if os.read(key.fd, 1) != b"+":
                        raise RankFailed(self._failure(key.data))

    def _failure(self, rank: int) -> str:
        # Others often fail because this one did; what they say in the next moment may still help.
        time.sleep(0.2)
        return f"rank {rank} of {self.world_size} failed\n" + self._logs([rank])

    def _hang(self, timeout: float) -> str:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1)
        return f"not all ranks were done after {timeout} s; their stacks:\n" + self._logs(list(self.pids))

    def _logs(self, ranks: list[int]) -> str:
        parts = []
        for rank in ranks:
            lines = self.log(rank).read_text(errors="replace").splitlines() if self.log(rank).exists() else []
            parts.append(f"--- rank {rank}\n" + "\n".join(lines[-_LOG_LINES:]))
        return "\n".join(parts)

    def kill(self) -> None:
        """End and reap every rank that is still there, and close the pipes."""
        for rank, pid in self.pids.items():
            done = rank in self.pipes and self.result(rank).exists()
            if not done:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(self.pipes[rank])


def _child(
    job: _Job, rank: int, port: int, writer: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> NoReturn:
    code = 1
    try:
        log = os.open(job.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable(sys.stderr)
        faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
        size = str(job.world_size)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        # torch makes its thread pool anew after a fork, and not safely from the several threads of an autograd engine.
        torch.set_num_threads(1)
        value = function(*args)
        part = job.result(rank).with_suffix(".part")
        torch.save(value, part)
        part.rename(job.result(rank))
        os.write(writer, b"+")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: what the parent registered to run at its end is not the rank's to run.
        os._exit(code)
