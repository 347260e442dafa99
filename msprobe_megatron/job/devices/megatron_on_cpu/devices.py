"""`torch.cuda` as a description of the host: one device, which is the CPU, with no memory pool to speak of.
`is_available` keeps telling the truth, also to torch builds that would now count the device invented here.
"""

from __future__ import annotations

import collections
import os
import types
from typing import Any

import torch

from msprobe_megatron.job.devices.megatron_on_cpu.substitute import CPU, constant, substitute

#: what Megatron compares against: an architecture with bf16, nothing newer
_CAPABILITY = (8, 0)
_MEMORY = 1 << 33


class _DeviceContext:
    """Stands for `torch.cuda.device(...)` and friends: entering changes nothing."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


def _properties(device: Any = None) -> types.SimpleNamespace:
    major, minor = _CAPABILITY
    return types.SimpleNamespace(
        name="cpu", major=major, minor=minor, multi_processor_count=1, total_memory=_MEMORY, warp_size=32
    )


def _device_count() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def install() -> None:
    """Replace the queries; `current_device` answers a torch.device, so that what is built on it is on CPU."""
    cuda = (torch.cuda,)
    substitute(cuda, "is_available", constant(False))
    substitute(cuda, "current_device", constant(CPU))
    substitute(cuda, "device_count", _device_count)
    substitute(cuda, "get_device_properties", _properties)
    substitute(cuda, "get_device_capability", constant(_CAPABILITY))
    substitute(cuda, "get_device_name", constant("cpu"))
    for name in ("set_device", "init", "_lazy_init"):
        substitute(cuda, name, constant(None))
    for name in ("device", "device_of"):
        setattr(torch.cuda, name, _DeviceContext)

    memory = (torch.cuda, torch.cuda.memory)
    substitute(memory, "memory_stats", lambda device=None: collections.defaultdict(int))
    substitute(memory, "mem_get_info", constant((_MEMORY, _MEMORY)))
    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "empty_cache"):
        substitute(memory, name, constant(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        substitute(memory, name, constant(0))
    for name in ("device_memory_used", "utilization", "temperature", "power_draw", "clock_rate"):
        substitute(cuda, name, constant(0))
