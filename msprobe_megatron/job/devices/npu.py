"""Ascend devices through `torch_npu`, which is imported only where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

from msprobe_megatron.job.devices.base import AcceleratorBackend


def usable() -> bool:
    """Tell whether torch_npu is installed, can be imported (it needs CANN) and sees a device."""
    return why_not() == ""


def why_not() -> str | None:
    """Why a torch_npu that is installed cannot be used; empty if it can, None where it is not installed."""
    if "torch_npu" not in sys.modules:
        if importlib.util.find_spec("torch_npu") is None:
            return None
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # noqa: BLE001  without CANN or a driver it fails in many ways
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return f"torch_npu cannot be imported: {first[:200]}"
    module = getattr(torch, "npu", None)
    if module is None or not module.is_available():
        return "torch_npu sees no device"
    return ""


def backend() -> AcceleratorBackend:
    """Build the NPU backend; float32, because the device has no native float64 reductions."""
    return AcceleratorBackend("npu", getattr(torch, "npu"), torch.float32)  # noqa: B009
