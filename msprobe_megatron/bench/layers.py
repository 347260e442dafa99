"""How the cost of the dump grows with the number of layers: what 192 add over what 24 add, and the memory of both."""

from __future__ import annotations

from typing import Any

from msprobe_megatron.bench.options import Options, measured
from msprobe_megatron.bench.turns import Workload

ABOUT = (
    "CPU time that a recorded step adds, of many layers over few: 8 where the cost of a layer does not depend on how"
    " many there are. `added` is in seconds; `peak` is the resident memory with the kit less that without."
)
FEW, MANY = 24, 192
VARIANTS: dict[str, dict[str, Any]] = {level: {"dump": {"level": level}} for level in ("L0", "L1", "mix")}
TARGET, MEMORY_TARGET = 8.5, 64 << 20
_FLAGS = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --attention-dropout 0"
    " --hidden-dropout 0 --swiglu --normalization RMSNorm --position-embedding-type rope"
)


def bench(options: Options) -> list[dict[str, Any]]:
    """A line for each level: the growth, asked to be at most 8.5, and the memory of the larger model.

    Example::

        bench(Options(Path("bench_out"), only="L0"))
    """
    variants = {name: file for name, file in VARIANTS.items() if options.only in (None, name)}
    found = {layers: _added(layers, variants, options) for layers in (FEW, MANY)} if variants else {}
    lines = []
    for name in variants:
        few, many = found[FEW][name], found[MANY][name]
        lines.append(
            {
                "name": f"{name}: {MANY} layers over {FEW}",
                "ratio": many["added_s"] / few["added_s"],
                "target": TARGET,
                "added_s": many["added_s"],
                "rows": many["rows"],
                "microseconds": many["microseconds"],
                "peak_bytes": many["memory"],
            }
        )
    return lines


def _added(layers: int, variants: dict[str, dict[str, Any]], options: Options) -> dict[str, dict[str, Any]]:
    workload = Workload(f"layers{layers}", f"--num-layers {layers} {_FLAGS}", options.turns or 3, 2)
    options.progress(f"{layers} layers")
    lines = measured(workload, variants, options)
    plain, *others = lines
    return {
        line["name"].partition(":")[2]: {
            "added_s": line["median_s"] - plain["median_s"],
            "memory": max(0, line["peak_bytes"] - plain["peak_bytes"]),
            "rows": line["rows"],
            "microseconds": line["microseconds"],
        }
        for line in others
    }
