"""The machine a figure was measured on, in the few words that matter for it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores, memory, accelerator and versions; no host name."""
    import torch

    from msprobe_megatron.job import devices
    from msprobe_megatron.job.measure import native
    from msprobe_megatron.topology.host import framework

    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory(),
        "device": devices.select().name,
        "torch_threads": torch.get_num_threads(),
        "native_kernel": native.load() is not None,
        "load": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": framework.versions(),
    }


def _memory() -> int:
    return int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]) * 1024


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
