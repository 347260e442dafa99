"""Ascend devices through `torch_npu`, which is imported only where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

from .accelerator import AcceleratorBackend


def usable() -> bool:
    """Tell whether torch_npu is installed, can be imported (it needs CANN) and sees a device."""
    if "torch_npu" not in sys.modules:
        if importlib.util.find_spec("torch_npu") is None:
            return False
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError):  # installed, but no CANN libraries on this machine
            return False
    module = getattr(torch, "npu", None)
    return module is not None and bool(module.is_available())


def backend() -> AcceleratorBackend:
    """Build the NPU backend; float32, because the device has no native float64 reductions."""
    return AcceleratorBackend("npu", getattr(torch, "npu"), torch.float32)  # noqa: B009
