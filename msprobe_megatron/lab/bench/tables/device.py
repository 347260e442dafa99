"""What a row costs on a device: launches, host time, waits of the host and bytes, ours and msprobe's, and the floor.

On the accelerator of this machine if it has one, else on the simulated device (docs/device.md). Every variant is a
process of its own that trains the plain decoder, first without a tool; what is printed is what the tool adds.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import msprobe_megatron
from msprobe_megatron.lab.bench.clockwork.turns import BenchFailed
from msprobe_megatron.lab.bench.models.floor import CARDS, MODELS, Predicted
from msprobe_megatron.lab.bench.options import Options
from msprobe_megatron.lab.bench.peer.columns import PeerFailed, run_worker
from msprobe_megatron.lab.bench.tables.dump import PAIRS as DUMPS
from msprobe_megatron.lab.bench.tables.monitor import PAIRS as MONITORS

ABOUT = (
    "Added by the tool to a step of a plain decoder (4 layers, hidden 64, float32), a row being a line of the tool's"
    " own record and a tensor what a row describes: one that stands in two rows is read once, so that fewer than 1"
    " launch a tensor and than 4 bytes an element are possible. host_us: least CPU time of the threads of training; the"
    " simulated device runs its kernels on them, and a real launch costs more than one of its. syncs: waits of the host"
    " on these threads. On a real device launches and bytes are those of the operators that torch dispatches. Lines"
    " named predicted: no card was used; bytes that L0 reads of the tensors of the model's modules in bf16 over 80 % of"
    " the bandwidth, plus launches times their cost, as if neither overlapped with training; L1 and mix read as much"
    " more than L0 as they do in the lines above, whose attention is not fused; a middle stage where there are several."
)
_MEASURED = {"simulated": "counted on the simulated device (no GPU or NPU)", "": "measured on {}"}
_PREDICTED = "predicted by calculation, not measured"
VARIANTS: dict[str, dict[str, Any]] = {
    "L0": {"dump": {"level": "L0"}},
    "L1": {"dump": {"level": "L1"}},
    "mix": {"dump": {"level": "mix"}},
    "L0+digest": {"dump": {"level": "L0", "digest": True}},
    "L0+sketch": {"dump": {"level": "L0", "sketch": 64}},
    "monitor": {"monitor": {"activations": True, "gradients": True, "optimizer": True}},
    "perturb": {"perturb": {"stage": "forward", "budget": "all"}},
}
# What the peer has of the same kind.
PEERS = {pair.name: pair for pair in DUMPS if pair.name in VARIANTS}
PEERS["monitor"] = next(pair for pair in MONITORS if pair.name == "all")
NO_PEER = {"L0+sketch": "msprobe has no sketches", "perturb": "msprobe 26 has no free benchmark any more"}
# Of the issue that asked for this bench: launches a tensor, µs a row, bytes an element.
ASKED = {
    "L0": {"launches_per_tensor": 1, "host_us_per_row": 10, "syncs_per_step": 0, "bytes_per_element": 4.5},
    "mix": {"launches_per_tensor": 1, "host_us_per_row": 15, "syncs_per_step": 0, "bytes_per_element": 4.5},
    "monitor": {"syncs_per_step": 0},
    "perturb": {"syncs_per_step": 0, "launches_per_step": 4000},
}
_LEVELS = ("L0", "L1", "mix")
_STEPS, _SIZE = 12, "h64"
_WORKER = "device_worker.py"
_PACKAGE = str(Path(msprobe_megatron.__file__).parents[1])


def bench(options: Options) -> list[dict[str, Any]]:
    """A line for each variant, for the peer's of the same kind, and for each card and model that is predicted."""
    names = [name for name in VARIANTS if options.only in (None, name)]
    work = [(name, sys.executable, "ours", VARIANTS[name]) for name in names]
    if options.peer_python is not None:
        some = [(name, PEERS[name]) for name in names if name in PEERS]
        work += [(f"peer:{name}", options.peer_python, pair.peer_tool, pair.peer) for name, pair in some]
    lines: dict[str, dict[str, Any]] = {}
    for at, (name, python, tool, config) in enumerate(work):
        options.progress(f"device: {name}", at / len(work))
        lines[name] = _line(name, python, tool, config, options)
    if options.peer_python is not None:
        lines |= {f"peer:{name}": _none(f"peer:{name}", NO_PEER[name]) for name in names if name in NO_PEER}
    return [*lines.values(), *predictions(lines)]


def predictions(lines: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each card and model; L1 and mix only where this run has counted what they read beside L0."""
    found: list[dict[str, Any]] = []
    for level in _LEVELS:
        factors = _factors(lines, level)
        if factors is not None:
            found += [{"table": _PREDICTED, **Predicted(m, c, level, *factors).line()} for m in MODELS for c in CARDS]
    return found


def _factors(lines: dict[str, dict[str, Any]], level: str) -> tuple[float, float] | None:
    if level == "L0":
        return 1.0, 1.0
    if level not in lines or "L0" not in lines:
        return None
    more, less = lines[level], lines["L0"]
    if more["activation_bytes"] is None or less["activation_bytes"] is None:
        return None
    # Without the weights, which are most of what is read of so small a model.
    return more["activation_bytes"] / less["activation_bytes"], more["launches_per_step"] / less["launches_per_step"]


def _line(name: str, python: str, tool: str, config: dict[str, Any], options: Options) -> dict[str, Any]:
    runs = []
    for turn in range(options.turns or 1):
        # The peer refuses paths with a plus sign.
        folder = options.out / "device" / re.sub(r"\W", "_", f"{name}_{turn}")
        task = {"tool": tool, "size": _SIZE, "steps": _STEPS, "folder": str(folder), "config": config}
        try:
            runs.append(run_worker(python, {**task, "package": _PACKAGE}, _WORKER))
        except PeerFailed as error:
            if tool == "ours":
                raise BenchFailed(f"bench device: {name}: {str(error).strip().splitlines()[-1]}") from None
            return _none(name, " ".join(str(error).split())[-160:])
    best = min(runs, key=lambda run: run["with"]["seconds"] - run["plain"]["seconds"])
    return {**_costs(name, best), "asked": ASKED.get(name)}


def _none(name: str, why: str) -> dict[str, Any]:
    return {**_costs(name, None), "notes": {name: why}}


def _costs(name: str, run: dict[str, Any] | None) -> dict[str, Any]:
    keys = ("launches_per_tensor", "host_us_per_row", "syncs_per_step", "bytes_per_element")
    if run is None or not run["rows"]:
        return {"name": name, **dict.fromkeys(keys)}
    added = {key: run["with"][key] - run["plain"][key] for key in run["plain"]}
    device = run["device"]
    return {
        "name": name,
        "table": _MEASURED["simulated"] if device == "simulated" else _MEASURED[""].format(device),
        "launches_per_tensor": round(added["launches"] / run["rows"], 3),
        "host_us_per_row": round(added["seconds"] * 1e6 / run["rows"], 2),
        "syncs_per_step": round(added["syncs"], 2),
        "bytes_per_element": _rounded(added["bytes"] / run["elements"]) if run["elements"] else None,
        "rows_per_step": run["rows"],
        "launches_per_step": round(added["launches"]),
        # Without weights and their gradients, which a level reads once a step.
        "activation_bytes": _rounded(added["bytes"] - 2 * run["weight_bytes"]) if name in _LEVELS else None,
        "bytes_added_peak": round(added["peak"]),
    }


def _rounded(value: float) -> float | None:
    """A figure for the table; None where it could not be counted."""
    return None if math.isnan(value) else round(value, 3)
