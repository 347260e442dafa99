"""Jobs of the demo on the simulated device, with and without the kit, each trained once for all tests.

What comes back of a rank: every number that the kit must not change, and for each step after the first what the device
counted and which waits of the host there were on the threads of training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.jobs.distributed.layouts import LAYOUTS, train_and_keep
from tests.support.device import DeviceProcess
from tests.support.forked import run_forked

SHAPE = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16"
    " --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-2 --seed 7 --vocab-size 64 --swiglu"
    " --normalization RMSNorm"
)
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
_MONITOR = (
    "{clipped: true, microbatch_gradients: true, master_weights: true, update: true, agreement: true,"
    " parameters: true, data: true, comm: true, metrics: [attention, stable_rank], alerts: [nonfinite, spike]}"
)
_FAULTY: list[Any] = []  # libraries, whose implementations last as long as they do
_CHECKS = "{replicas: true, optimizer: true, rng: true, every: 1}"
PROBES = {
    "L0": "dump: {level: L0}",
    "L1": "dump: {level: L1}",
    "mix": "dump: {level: mix}",
    "digest": "dump: {level: L0, digest: true}",
    "md5": "dump: {level: L0, digest: md5}",
    "sketch": "dump: {level: mix, digest: true, sketch: 8}",
    "tensor": "dump: {level: mix, task: tensor}",
    "nonfinite": "dump: {level: mix, task: nonfinite}",
    "monitor": f"monitor: {_MONITOR}",
    "checks": f"checks: {_CHECKS}",
    "recorder": "recorder: {keep_steps: 2}",
    "perturb_forward": "perturb: {stage: forward, budget: all}",
    "perturb_backward": "perturb: {stage: backward, budget: all}",
    "everything": "dump: {level: mix, digest: true, sketch: 8}\n"
    f"monitor: {_MONITOR}\nchecks: {_CHECKS}\nrecorder: {{keep_steps: 2}}",
}


def break_the_kit(fault: str) -> None:
    """Make the kit do with each tensor that it measures what it must not."""
    import ctypes

    import torch

    from msprobe_megatron.hosts.rehearsal import simulated_device
    from msprobe_megatron.job.measure.operator import NAME, measure_into_slot

    loaded = simulated_device.extension()

    def faulty(x: torch.Tensor, row: torch.Tensor, *args: Any) -> None:
        if fault == "host_read":
            ctypes.c_byte.from_address(x.data_ptr()).value  # noqa: B018  (the read is the fault)
        elif fault == "host_wait":
            x.sum().item()
        else:
            x + 0  # one launch more
        loaded.count_launch(NAME)
        measure_into_slot(loaded.kernel_view(x, False), loaded.kernel_view(row, True), *args)

    _FAULTY.append(torch.library.Library("msprobe", "IMPL"))
    _FAULTY[-1].impl(NAME, faulty, "PrivateUse1", allow_override=True)


def train(argv: list[str], planted: dict[str, int]) -> dict[str, Any]:
    """Train in this rank, on the device, and answer in host tensors; faults are planted from the second step on."""
    import torch

    from msprobe_megatron.hosts.rehearsal import simulated_device

    loaded = simulated_device.extension()
    steps: list[dict[str, Any]] = []
    trace = simulated_device.Trace()

    def each_step() -> None:
        if steps:
            trace.__exit__()
            waits = [entry for entry in trace.waits if not entry.thread.startswith("msprobe")]
            steps[-1] = {
                **trace.counts,
                "waits": [entry.what for entry in waits],
                "of_the_kit": [str(entry) for entry in waits if entry.of_the_kit],
                "raced": [str(entry) for entry in trace.races],
            }
            trace.entries.clear()
        else:
            for name, value in planted.items():
                loaded.plant(name, value) if name in simulated_device.FAULTS else break_the_kit(name)
        steps.append({})
        trace.__enter__()

    kept = train_and_keep(argv, each_step)
    trace.__exit__()
    kept["rng"]["device"] = torch.npu.get_rng_state()
    return {**_on_host(kept), "steps": steps[:-1]}


def _on_host(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    return [_on_host(item) for item in value] if isinstance(value, list) else value


class DeviceJobs:
    """Runs each job once and remembers what it gave."""

    def __init__(self, device: DeviceProcess, root: Path) -> None:
        self._device, self._root = device, root
        self._done: dict[Any, list[dict[str, Any]]] = {}

    def plain(self, layout: str) -> list[dict[str, Any]]:
        """The ranks' numbers without the kit, with dropout."""
        return self._run(("plain", layout), layout, f"{SHAPE} {LAYOUTS[layout].flags}".split(), {})

    def probed(self, layout: str, probe: str, flags: str = "", **planted: int) -> tuple[Path, list[dict[str, Any]]]:
        """The run directory and the ranks' numbers with the kit on in all three steps."""
        name = "_".join([layout, probe, *(["flags"] if flags else []), *planted])
        argv = f"{SHAPE} {LAYOUTS[layout].flags} {flags}".split()
        out = self._root / name
        return out, self._run(name, layout, [*argv, *self._kit(out, probe)], planted)

    def on_cpu(self, layout: str, probe: str) -> Path:
        """The run directory of the same job in host memory, without dropout: the generators differ."""
        out = self._root / f"{layout}_{probe}_cpu"
        if not out.exists():
            argv = f"{SHAPE} {LAYOUTS[layout].flags} {NO_DROPOUT} --msprobe-device cpu".split()
            run_forked(LAYOUTS[layout].world, train_and_keep, [*argv, *self._kit(out, probe)])
        return out

    def _kit(self, out: Path, probe: str) -> list[str]:
        file = out.with_suffix(".yaml")
        file.write_text(f"steps: ['0-2']\n{PROBES[probe]}\n", encoding="utf-8")
        return ["--msprobe-config", str(file), "--msprobe-output", str(out)]

    def _run(self, key: Any, layout: str, argv: list[str], planted: dict[str, int]) -> list[dict[str, Any]]:
        if key not in self._done:
            self._done[key] = self._device.run(train, argv, planted, world=LAYOUTS[layout].world)
        return self._done[key]
