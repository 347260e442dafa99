"""Cost of the monitor: what watching adds to every step, and seed 003's set-up over two tensor-parallel processes."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_megatron.lab.bench.clockwork.processes import measure_in_processes
from msprobe_megatron.lab.bench.clockwork.turns import Workload
from msprobe_megatron.lab.bench.models.workloads import WORKLOADS, asked
from msprobe_megatron.lab.bench.options import Options, measured
from msprobe_megatron.lab.bench.peer.columns import Pair, columns

ABOUT = (
    "CPU time of a training step over that of the steps without the kit beside it, in one process, variants changing"
    " from step to step; medians. h64: turns of 100 steps, files included. h1024: two microbatches a step; every_100"
    " is a hundredth of all plus what a step that is not watched costs. tp2: tensor parallel processes, seed 003's"
    " layers and tensors, off, on one rank and on all; asked is what the seed reports for 40 layers on eight cards of"
    " another machine."
)
_LAYERS = 4
# Seed 003: input, output and their gradients of each layer, and nothing else.
_SIDES = {"input": "tuple[2]:0", "output": "tensor", "input_grad": "tuple[2]:0", "output_grad": "tuple[1]:0"}
_BOUNDARIES = {
    "targets": {f"decoder.layers.{layer}": _SIDES for layer in range(_LAYERS)},
    "gradients": False,
    "optimizer": False,
}
_ALL: dict[str, Any] = {"activations": True, "gradients": True, "optimizer": True}
_GRADIENTS = {**_ALL, "activations": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "boundaries": {"monitor": _BOUNDARIES},
    "all": {"monitor": _ALL},
    "gradients": {"monitor": _GRADIENTS},
    "every_100": {"monitor": {**_ALL, "every": 100}},
}
_OVER_RANKS: dict[str, dict[str, Any]] = {
    "one_rank": {"ranks": [0], "monitor": _BOUNDARIES},
    "all_ranks": {"monitor": _BOUNDARIES},
}
TARGETS = {
    **{"h1024:boundaries": 1.01, "h1024:all": 1.04, "h1024:gradients": 1.01, "h1024:every_100": 1.001},
    **{"h64:boundaries": 1.2, "h64:all": 2.0, "h64:gradients": 1.2, "h64:every_100": 1.02},
    # What the ancestor published for one rank and for all of them.
    **{"tp2:one_rank": 1.063, "tp2:all_ranks": 1.088},
}
_H64 = Workload("h64", WORKLOADS["h64"].flags, turns=13, steps=100, warm_up=2, whole=True)
_H1024 = Workload("h1024", f"{WORKLOADS['h1024'].flags} --global-batch-size 2", turns=18, steps=1, warm_up=0)
_TP2 = Workload("tp2", f"{WORKLOADS['h1024'].flags} --sequence-parallel", turns=14, steps=1, warm_up=0)
EXTRA_BYTES = 50 << 20
_OFF_STEPS = 2000


def _peer(**switched: bool) -> dict[str, Any]:
    """The settings of msprobe's own monitor."""
    return {"targets": {}, "ops": ["norm", "min", "max", "mean", "nans"], "format": "csv", **switched}


# The same of the plain model, whose layers take and give one tensor.
_PLAIN_SIDES = {"input": "tuple[1]:0", "output": "tensor", "input_grad": "tuple[1]:0", "output_grad": "tuple[1]:0"}
_PLAIN_TARGETS = {f"layers.{layer}": _PLAIN_SIDES for layer in range(_LAYERS)}
PAIRS = [
    Pair(
        "boundaries",
        {"monitor": {**_BOUNDARIES, "targets": _PLAIN_TARGETS}},
        {**_peer(xy_distribution=True), "targets": _PLAIN_TARGETS},
        "msprobe_monitor",
    ),
    *(
        Pair(name, VARIANTS[name], _peer(**dict.fromkeys(switches, True)), "msprobe_monitor")
        for name, switches in (
            ("all", ("xy_distribution", "wg_distribution", "mv_distribution")),
            ("gradients", ("wg_distribution", "mv_distribution")),
        )
    ),
]


def bench(options: Options) -> list[dict[str, Any]]:
    """A line for each variant of h64, h1024 and tp2."""
    lines: list[dict[str, Any]] = []
    for workload in asked(options, [_H64, _H1024, _TP2]):
        if workload.name == "tp2":
            lines += _seed(workload, options)
        elif workload.name == "h1024":
            some = {name: variant for name, variant in VARIANTS.items() if name != "every_100"}
            lines += _with_every_100(measured(workload, some, options))
            lines += columns("h1024", PAIRS, options, steps=2, rounds=1)
        else:
            lines += measured(workload, VARIANTS, options)
            lines += columns("h64", PAIRS, options, rounds=2) if workload.name == "h64" else []
    for line in lines:
        line["target"] = TARGETS.get(line["name"])
        if line["target"] is not None:
            line["asked"] = {"extra_bytes": EXTRA_BYTES}
    return lines


def profiled(name: str) -> tuple[Workload, dict[str, Any]] | None:
    """What a line's profile is made of; those of several processes have that of one."""
    size, _, variant = name.partition(":")
    workload = {"h64": _H64, "h1024": _H1024, "tp2": WORKLOADS["h1024"]}.get(size)
    file = {**VARIANTS, **_OVER_RANKS}.get(variant)
    return (workload, file) if workload is not None and file is not None else None


def _seed(workload: Workload, options: Options) -> list[dict[str, Any]]:
    """Seed 003: off, on one rank, on all of them."""
    ranks = options.ranks or 2
    over = replace(workload, flags=f"{workload.flags} --tensor-model-parallel-size {ranks}")
    return measure_in_processes(over, _OVER_RANKS, options.out, ranks, options.progress)


def _with_every_100(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A hundred steps of this size take minutes: the line is put together from what can be measured."""
    found = {line["name"]: line for line in lines}
    plain, full = found["h1024:plain"], found["h1024:all"]
    line = dict(full, name="h1024:every_100", microseconds=None)
    for key, base in (("ratio", plain["median_s"]), ("training_ratio", plain["median_s"])):
        line[key] = 1 + (full[key] - 1) / 100 + off_step_seconds() / base
    line["uncertainty"] = full["uncertainty"] / 100
    line["median_s"] = plain["median_s"] * line["ratio"]
    return [*lines, line]


def off_step_seconds() -> float:
    """What a step that is not watched costs: everything the session does in it, with no training in between.

    Example::

        >>> off_step_seconds() < 1e-3
        True
    """
    import torch

    from msprobe_megatron import attach
    from msprobe_megatron.config import Overrides, from_document

    model = torch.nn.Linear(1, 1)
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with quiet[0], quiet[1], tempfile.TemporaryDirectory(prefix="msprobe_bench_") as folder:
        output = Overrides(output=str(Path(folder) / "off"))
        config = from_document({"monitor": {**_ALL, "start_step": 10**8}}, "bench", output)
        session = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), config, step=0)
        began = time.thread_time()
        for _ in range(_OFF_STEPS):
            session.schedule_begin("bench", 1)
            session.schedule_end()
            session.optimizer_begin()
            session.optimizer_end()
        took = time.thread_time() - began
        session.close()
    return took / _OFF_STEPS
