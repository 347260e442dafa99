"""Cost of the dump: seed 000's first table, for every level, with and without a digest."""

from __future__ import annotations

from typing import Any

from msprobe_megatron.lab.bench.models.workloads import WORKLOADS, asked
from msprobe_megatron.lab.bench.options import Options, measured
from msprobe_megatron.lab.bench.peer.columns import Pair, columns

ABOUT = (
    "CPU time of a training step over that of the steps without the kit beside it, in one process, variants changing"
    " from step to step; medians. h64 shows the host's cost of a tensor, h1024 that of the arithmetic; both are of a"
    " CPU: copies and synchronisations of a device are not in them. Across models and machines only ratios can be"
    " compared."
)
VARIANTS: dict[str, dict[str, Any]] = {
    "loaded": {"steps": [10**8], "dump": {"level": "L0"}},
    "L0": {"dump": {"level": "L0"}},
    "L1": {"dump": {"level": "L1"}},
    "mix": {"dump": {"level": "mix"}},
    "L0+digest": {"dump": {"level": "L0", "digest": True}},
    "L1+digest": {"dump": {"level": "L1", "digest": True}},
    "mix+digest": {"dump": {"level": "mix", "digest": True}},
}
# What the issue asks of each line; "with digest" is asked relative to the same line without.
TARGETS = {
    **{"h64:loaded": 1.01, "h64:L0": 1.5, "h64:L1": 4.0, "h64:mix": 5.0},
    **{"h1024:loaded": 1.005, "h1024:L0": 1.02, "h1024:L1": 1.12, "h1024:mix": 1.15},
}
DIGEST_TARGETS = {"h64": 1.3, "h1024": 1.2}
MICROSECONDS = {"h64:L0": 10.0, "h64:L1": 20.0}
EXTRA_BYTES = 64 << 20


def _peer(level: str, summary: str) -> dict[str, Any]:
    """The probe file of msprobe itself; ALL records the same API calls that we do."""
    block = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": summary}
    return {"task": "statistics", "rank": [], "step": [], "level": level, "risk_level": "ALL", "statistics": block}


PAIRS = [
    *(Pair(level, VARIANTS[level], _peer(level, "statistics")) for level in ("L0", "L1", "mix")),
    *(Pair(f"{level}+digest", VARIANTS[f"{level}+digest"], _peer(level, "md5")) for level in ("L0", "L1", "mix")),
]


def bench(options: Options) -> list[dict[str, Any]]:
    """A line for each variant of h64 and h1024."""
    workloads = asked(options, [WORKLOADS["h64"], WORKLOADS["h1024"]])
    lines: list[dict[str, Any]] = []
    for workload in workloads:
        found = {line["name"]: line for line in measured(workload, VARIANTS, options)}
        for name, line in found.items():
            line["target"] = TARGETS.get(name)
            if workload.name not in DIGEST_TARGETS:
                continue
            if name.endswith("+digest"):
                line["target"] = DIGEST_TARGETS[workload.name] * found[name.removesuffix("+digest")]["ratio"]
            if line["rows"]:
                line["asked"] = {"extra_bytes": EXTRA_BYTES}
            if name in MICROSECONDS:
                line["asked"]["microseconds"] = MICROSECONDS[name]
        lines += found.values()
        if workload.name == "h64":
            lines += columns("h64", PAIRS, options, rounds=2)
        elif workload.name == "h1024":  # where a process of the peer takes half a minute
            few = [pair for pair in PAIRS if pair.name in ("L0", "L1", "mix", "L1+digest")]
            lines += columns("h1024", few, options, steps=2, rounds=1)
    return lines
