"""Cost of the dump: seed 000's first table, for every level, with and without a digest."""

from __future__ import annotations

from typing import Any

from msprobe_megatron.bench.options import Options, measured
from msprobe_megatron.bench.workloads import WORKLOADS

ABOUT = (
    "CPU time of a training step over that of the same step without the kit, in one process, taking turns. h64 shows"
    " the host's cost of a tensor, h1024 that of the arithmetic; synchronisations and copies of a device are not in it."
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


def bench(options: Options) -> list[dict[str, Any]]:
    """A line for each variant of h64 and h1024.

    Example::

        bench(Options(Path("bench_out"), only="h64"))
    """
    workloads = options.chosen([WORKLOADS["h64"], WORKLOADS["h1024"]])
    return [line for workload in workloads for line in measured(workload, VARIANTS, options)]
