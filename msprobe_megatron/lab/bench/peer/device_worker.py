"""Trains the plain model on a device under one tool and prints what a step of it costs there, as JSON.

Run by path: ``python device_worker.py TASK.json``, by this interpreter for our own tool and by the peer's for msprobe.
The task names the tool, the size, the steps, a folder and a config as that of `worker` does, and ``package``: where
msprobe_megatron lies, for the simulated device of an interpreter that has neither an accelerator nor the package.

Steps without the tool come first, in the same process; what is printed is the difference. Timed steps and counted
steps are not the same: counting takes time.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# By path: the peer's interpreter has nothing of this package.
sys.path.insert(0, str(Path(__file__).parent))
build = importlib.import_module("plain_gpt").build
TOOLS = importlib.import_module("worker").TOOLS

WARM_UP, COUNTED = 3, 2
# What makes the host wait on every device: reading one number, and finding out how many there are.
_WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
_OURS = "msprobe::"
_SIZES = {"long int": 8, "double": 8, "int": 4, "float": 4, "c10::BFloat16": 2, "c10::Half": 2, "short int": 2}
_NO_LAUNCH = {"empty", "empty_strided", "empty_like", "new_empty", "resize_", "set_", "_local_scalar_dense"}
Counts = dict[str, float]


def device_of(package: str) -> str:
    """The device to train on: the accelerator of this machine, else the simulated one, which is loaded here."""
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        importlib.import_module("torch_npu")  # a real one, where it is installed
    found = torch.accelerator.current_accelerator()
    if found is not None and torch.accelerator.is_available():
        return str(found.type)
    sys.path.append(package)
    importlib.import_module("msprobe_megatron.hosts.rehearsal.simulated_device").install()
    return "npu"


def simulated() -> Any:
    """The module of the simulated device, or None where the device is a real one."""
    module = sys.modules.get("msprobe_megatron.hosts.rehearsal.simulated_device")
    return module if module is not None and module.installed() else None


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts launches, waits of the host and bytes of operands by what torch dispatches: works on any device.

    An operator that is no view is one launch, whatever its kernel launches by itself. The kit hides its own operators
    from modes: those are counted by torch's profiler, with what they are composed of where they are. Waits for events
    and streams are seen where they are made through the device's Python module.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._waits = device, contextlib.ExitStack()
        self._profile: Any = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        )
        self.counts: Counts = {"launches": 0, "syncs": 0, "bytes": 0}

    def __enter__(self) -> Any:
        """Count from here on."""
        module = getattr(torch, self._device)
        for owner, name in ((module, "synchronize"), (module.Event, "synchronize"), (module.Stream, "synchronize")):
            self._waits.enter_context(_replaced(owner, name, self._counted(getattr(owner, name))))
        self._waits.enter_context(self._profile)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: object) -> None:
        """Stop counting."""
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._waits.close()
        facts = {event.correlation_id(): event for event in self._profile.profiler.kineto_results.events()}
        for event in self._profile.events():
            if event.name.startswith(_OURS) and not any(_is_ours(child) for child in event.cpu_children):
                parts = sum(map(_launched, event.cpu_children))
                self.counts["launches"] += parts or 1
                # Composed of others, it has temporaries, of whose types the profiler tells nothing.
                own = facts[event.id]
                self.counts["bytes"] += math.nan if parts else _operand_bytes(own.shapes(), own.dtypes())

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts["syncs"] += not threading.current_thread().name.startswith("msprobe")
            return function(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what it takes, do the work."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = {id(x): x for x in given if x.device.type == self._device}
        found = func(*args, **kwargs)
        made = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        host = any(x.device.type == "cpu" for x in (*given, *made))
        there |= {id(x): x for x in made if x.device.type == self._device}
        if not there:
            return found
        self.counts["syncs"] += name in _WAITING
        if name in ("copy_", "_to_copy") and host:
            self.counts["syncs"] += _waits_for_copy(name, args, kwargs, made)
        if f"{func.namespace}::" == _OURS:
            return found
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and name not in _NO_LAUNCH:
            self.counts["launches"] += 1
            self.counts["bytes"] += sum(x.nbytes for x in there.values())
        return found


def _operand_bytes(shapes: list[list[int]], dtypes: list[str]) -> int:
    return sum(math.prod(shape) * _SIZES.get(name, 1) for shape, name in zip(shapes, dtypes, strict=True) if shape)


def _is_ours(event: Any) -> bool:
    """Whether it is an operator of the kit, or holds one: a mode shows a call once outside of it and once inside."""
    return event.name.startswith(_OURS) or any(map(_is_ours, event.cpu_children))


def _launched(event: Any) -> int:
    """Launches of an operator: of those that it calls, else its own, if it is more than a view or memory."""
    below = sum(map(_launched, event.cpu_children))
    return below or (event.name.rpartition("::")[2] not in _NO_LAUNCH and not _is_view(event.name))


@functools.cache
def _is_view(name: str) -> bool:
    schemas = torch._C._jit_get_schemas_for_operator(name)
    in_place = name.endswith(("squeeze_", "as_strided_", "transpose_", "t_"))
    return in_place or any(r.alias_info is not None and not r.alias_info.is_write for s in schemas for r in s.returns)


def _waits_for_copy(name: str, args: Any, kwargs: Any, made: list[torch.Tensor]) -> bool:
    """Whether a copy between host and device is one that the host waits for: blocking, or not of pinned memory."""
    asynchronous = kwargs.get("non_blocking", len(args) > 2 and bool(args[2]))  # noqa: PLR2004
    target, source = (args[0], args[1]) if name == "copy_" else (made[0], args[0])
    on_host = target if target.device.type == "cpu" else source
    return not (asynchronous and on_host.is_pinned())


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def counted(device: str, step: Callable[[], None], by: str) -> Counts:
    """What `COUNTED` steps take, on the threads of training; ``by`` the device's own ledger where it has one."""
    ledger = simulated()
    if ledger is None or by == "dispatch":
        with Dispatched(device) as mode:
            for _ in range(COUNTED):
                step()
        return {key: value / COUNTED for key, value in mode.counts.items()}
    with ledger.Trace() as trace:
        for _ in range(COUNTED):
            step()
    waits = [entry for entry in trace.waits if not entry.thread.startswith("msprobe")]
    found = {"launches": trace.counts["launches"], "syncs": len(waits), "bytes": trace.counts["bytes"]}
    return {key: value / COUNTED for key, value in found.items()}


def training_seconds() -> float:
    """CPU time of the process so far without the writer's threads: autograd has a thread of its own on a device."""
    writers = [thread for thread in threading.enumerate() if thread.name.startswith("msprobe")]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in writers if thread.ident is not None]
    return time.process_time() - sum(time.clock_gettime(clock) for clock in clocks)


def measured(device: str, step: Callable[[], None], steps: int, by: str) -> Counts:
    """The least host time of a step, what it launches, waits for and moves, and the peak of device memory."""
    memory = getattr(torch, device)
    for _ in range(WARM_UP):
        step()
    memory.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        began = training_seconds()
        step()
        times.append(training_seconds() - began)
    peak = float(memory.max_memory_allocated())
    return {"seconds": min(times), "peak": peak, **counted(device, step, by)}


def recorded(tool: str, folder: Path, step: int) -> tuple[int, int]:
    """Rows of a step in the tool's own files, and the elements of their tensors."""
    if tool == "ours":
        table = importlib.import_module("pyarrow.parquet")
        some = [table.read_table(path, columns=["step", "numel"]) for path in folder.rglob("*.parquet")]
        pairs = [pair for one in some for pair in zip(one["step"].to_pylist(), one["numel"].to_pylist(), strict=True)]
        sizes = [numel for at, numel in pairs if at == step]
    elif tool == "msprobe_monitor":
        sizes = []
        for path in folder.rglob("*.csv"):
            with path.open(encoding="utf-8", newline="") as file:
                rows = [row for row in csv.DictReader(file) if row.get("step") == str(step)]
            sizes += [math.prod(json.loads(row["shape"])) for row in rows if row["shape"].startswith("[")]
    else:
        files = [json.loads(path.read_text()) for path in folder.glob(f"step{step}/*/dump.json")]
        sizes = [numel for file in files for numel in _tensors(file["data"])]
    return len(sizes), sum(sizes)


def _tensors(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        if str(value.get("type", "")).startswith("torch.") and "shape" in value:
            yield math.prod(value["shape"])
        else:
            for item in value.values():
                yield from _tensors(item)
    elif isinstance(value, list):
        for item in value:
            yield from _tensors(item)


def main(task: dict[str, Any]) -> None:
    """Do the task; the result is the last line of standard output."""
    torch.set_num_threads(1)
    device = device_of(task["package"])
    model, optimizer, tokens = build(task["size"], device)
    folder, steps, by = Path(task["folder"]), task["steps"], task.get("count_by", "ledger")

    def train(tool: Any) -> None:
        tool.begin()
        model(tokens).backward()
        tool.gradients_done()
        optimizer.step()
        optimizer.zero_grad()

    nothing = TOOLS["none"](None, folder, model, optimizer)
    plain = measured(device, lambda: train(nothing), steps, by)
    tool = TOOLS[task["tool"]](task.get("config"), folder, model, optimizer)

    def step() -> None:
        train(tool)
        tool.end()

    found = measured(device, step, steps, by)
    tool.close()
    rows, elements = recorded(task["tool"], folder, WARM_UP + steps)
    answer: dict[str, Any] = {"device": "simulated" if simulated() else device, "rows": rows, "elements": elements}
    answer["weight_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    print("\n" + json.dumps({**answer, "plain": plain, "with": found}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
