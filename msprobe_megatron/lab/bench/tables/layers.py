"""How the cost of the dump grows with the number of layers: what 192 add over what 24 add, and the memory of both."""

from __future__ import annotations

import math
from typing import Any

from msprobe_megatron.lab.bench.clockwork.turns import Workload
from msprobe_megatron.lab.bench.options import Options, measured

ABOUT = (
    "CPU time that a recorded step adds, of many layers over few: 8 where the cost of a layer does not depend on how"
    " many there are. `added s` are the seconds that a step of many layers takes longer, `added memory` is the peak of"
    " resident memory with the kit less that without. Layers of width 16: not to be compared with other tables."
)
FEW, MANY = 24, 192
_TURNS, _OF_FEW = 14, 6
"""Turns of the larger model; so many times as many of the smaller one, whose steps are shorter."""
VARIANTS: dict[str, dict[str, Any]] = {level: {"dump": {"level": level}} for level in ("L0", "L1", "mix")}
TARGET, MEMORY_TARGET = 8.5, 64 << 20
_FLAGS = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --attention-dropout 0"
    " --hidden-dropout 0 --swiglu --normalization RMSNorm --position-embedding-type rope"
)


def bench(options: Options) -> list[dict[str, Any]]:
    """A line for each level: the growth, asked to be at most 8.5, and the memory of the larger model."""
    variants = {name: file for name, file in VARIANTS.items() if options.only in (None, name)}
    found = {layers: _added(layers, variants, options) for layers in (FEW, MANY)} if variants else {}
    lines = []
    for name in variants:
        few, many = found[FEW][name], found[MANY][name]
        ratio = many["added_s"] / few["added_s"]
        lines.append(
            {
                **many,
                "name": f"{name}: {MANY} layers over {FEW}",
                "ratio": ratio,
                "uncertainty": ratio * math.hypot(*(one["uncertainty"] / one["added_s"] for one in (few, many))),
                "target": TARGET,
                "asked": {"extra_bytes": MEMORY_TARGET},
            }
        )
    return lines


def profiled(name: str) -> tuple[Workload, dict[str, Any]]:
    """What a line's profile is made of: the larger model at its level."""
    return _workload(MANY, 1), VARIANTS[name.partition(":")[0]]


def _workload(layers: int, turns: int) -> Workload:
    return Workload(f"layers{layers}", f"--num-layers {layers} {_FLAGS}", turns, 2)


def _added(layers: int, variants: dict[str, dict[str, Any]], options: Options) -> dict[str, dict[str, Any]]:
    turns = options.turns or _TURNS * (_OF_FEW if layers == FEW else 1)
    lines = measured(_workload(layers, turns), variants, options)
    plain, *others = lines
    kept = ("median_s", "spread", "peak_bytes", "bytes", "files", "rows", "microseconds", "extra_bytes")
    return {
        line["name"].partition(":")[2]: {
            "added_s": (line["ratio"] - 1) * plain["median_s"],
            "uncertainty": line["uncertainty"] * plain["median_s"],
            **{key: line[key] for key in kept},
        }
        for line in others
    }
