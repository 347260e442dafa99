"""NVIDIA (and ROCm) devices through `torch.cuda`."""

from __future__ import annotations

import torch

from msprobe_megatron.job.devices.base import AcceleratorBackend


def usable() -> bool:
    """Tell whether torch sees a CUDA device."""
    return bool(torch.cuda.is_available())


def backend() -> AcceleratorBackend:
    """Build the CUDA backend; call `usable` first."""
    return AcceleratorBackend("cuda", torch.cuda, torch.float64)
