"""Runs functions in a process that has the simulated device, which this one cannot have beside the CPU emulation.

The process imports torch and Megatron once and forks ranks for each call, as `forked` does:

    def work(flags):
        import torch
        return torch.ones(2, device="npu").sum().item()

    [answer] = device.run(work, ["--num-layers", "2"])
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]


class DeviceFailed(AssertionError):
    """A rank on the device raised, died or hung; the message holds what it said."""


class DeviceProcess:
    """The process, started on the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> DeviceProcess:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(timeout=30)

    def run(self, function: Callable[..., Any], *args: Any, world: int = 1, timeout: float = 240) -> list[Any]:
        """Call ``function(*args)`` in `world` forked ranks; arguments are JSON, answers what `torch.save` takes."""
        import torch

        process = self._started()
        with tempfile.TemporaryDirectory(prefix="device_") as folder:
            result = Path(folder, "result.pt")
            order = {"module": function.__module__, "name": function.__qualname__, "args": args}
            order |= {"world": world, "timeout": timeout, "result": str(result)}
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise DeviceFailed(f"the device process has ended with code {process.wait()}")
            answer = json.loads(line)
            if "error" in answer:
                raise DeviceFailed(answer["error"])
            return torch.load(result, weights_only=True)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.device"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._process


def _serve() -> None:
    """Take orders from the parent until it closes the pipe; answers go to what was stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from msprobe_megatron.hosts.rehearsal import simulated_device

    simulated_device.install()
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    import torch

    from tests.support.forked import prepare, run_forked

    prepare()
    for line in sys.stdin:
        order = json.loads(line)
        answer = {}
        try:
            function = getattr(importlib.import_module(order["module"]), order["name"])
            found = run_forked(order["world"], function, *order["args"], timeout=order["timeout"])
            torch.save(found, order["result"])
        except BaseException as error:
            answer["error"] = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    _serve()
