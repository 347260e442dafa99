"""Trains the plain model under one tool and prints the CPU time of its steps as JSON.

Run by path: ``python worker.py TASK.json``, by this interpreter for our own tool and by the peer's for msprobe. The
task names the tool (``none``, ``ours``, ``msprobe``, ``msprobe_monitor``), the size, the steps, a folder and a config.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

# By path: the peer's interpreter has nothing of this package.
sys.path.insert(0, str(Path(__file__).parent))
build = importlib.import_module("plain_gpt").build

WARM_UP = 2


class NoTool:
    """Nothing."""

    def __init__(self, config: Any, folder: Path, model: Any, optimizer: Any) -> None:
        """Take what every tool takes."""

    def begin(self) -> None:
        """A step begins."""

    def gradients_done(self) -> None:
        """Forward and backward are over, the optimizer has not begun."""

    def end(self) -> None:
        """A step is over, all that it writes included."""

    def close(self) -> None:
        """The job is over."""


class Ours(NoTool):
    """Our kit, attached to the plain loop."""

    def __init__(self, config: Any, folder: Path, model: Any, optimizer: Any) -> None:
        """Attach; the clock finds the steps by itself."""
        from msprobe_megatron import attach
        from msprobe_megatron.config import Overrides, from_document

        self.session = attach(model, optimizer, from_document(config, "bench", Overrides(output=str(folder))), step=0)

    def end(self) -> None:
        """Wait for the files of the step."""
        self.session.writer.flush()

    def close(self) -> None:
        """Close the run; one that disarmed itself would be timed as no tool."""
        self.session.close()
        if self.session.faults:
            raise RuntimeError(f"the kit switched itself off: {self.session.faults[0]}")


class Msprobe(NoTool):
    """The published PrecisionDebugger: dump, and in 8.3.3 the free benchmark."""

    def __init__(self, config: Any, folder: Path, model: Any, optimizer: Any) -> None:
        """Start it as its manual says."""
        debugger = importlib.import_module("msprobe.pytorch").PrecisionDebugger

        folder.mkdir(parents=True, exist_ok=True)
        path = folder.with_suffix(".json")
        path.write_text(json.dumps({**config, "dump_path": str(folder)}))
        if config.get("task") == "free_benchmark":
            # Without a process group its free benchmark does nothing.
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
            torch.distributed.init_process_group("gloo", rank=0, world_size=1)
        self.debugger, self.model = debugger(config_path=str(path)), model

    def begin(self) -> None:
        """Its hooks come with every start."""
        self.debugger.start(self.model)

    def gradients_done(self) -> None:
        """Before the optimizer, whose calls our own L1 does not record either."""
        self.debugger.stop()

    def end(self) -> None:
        """Its files are written by stop and step."""
        self.debugger.step()


class MsprobeMonitor(NoTool):
    """The published TrainerMon (v1), which follows optimizer.step."""

    def __init__(self, config: Any, folder: Path, model: Any, optimizer: Any) -> None:
        """Start it as its manual says."""
        os.environ["MONITOR_OUTPUT_DIR"] = str(folder)
        monitor = importlib.import_module("msprobe.pytorch").TrainerMon
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.with_suffix(".json")
        path.write_text(json.dumps(config))
        self.monitor = monitor(str(path), params_have_main_grad=False)
        self.monitor.set_monitor(model, optimizer=optimizer, grad_acc_steps=1)


TOOLS = {"none": NoTool, "ours": Ours, "msprobe": Msprobe, "msprobe_monitor": MsprobeMonitor}


def _peak_bytes() -> int:
    """Resident memory at most; getrusage would count that of the process that started this one."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def main(task: dict[str, Any]) -> None:
    """Do the task; the result is the last line of standard output."""
    torch.set_num_threads(1)
    model, optimizer, tokens = build(task["size"])
    folder = Path(task["folder"])
    tool = TOOLS[task["tool"]](task.get("config"), folder, model, optimizer)
    times = []
    for _ in range(WARM_UP + task["steps"]):
        began = time.process_time()
        tool.begin()
        loss = model(tokens)
        loss.backward()
        tool.gradients_done()
        optimizer.step()
        optimizer.zero_grad()
        tool.end()
        times.append(time.process_time() - began)
    tool.close()
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    found = {"times": times[WARM_UP:], "bytes": size, "files": len(files), "loss": loss.detach().item()}
    found["peak_bytes"] = _peak_bytes()
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
