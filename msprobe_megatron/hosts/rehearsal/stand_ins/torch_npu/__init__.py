"""Stands in for torch_npu where there is no NPU, so that ModelLink and MindSpeed can be imported and trained there.

`torch.npu` is the simulated device where that is installed, else `torch.cuda`, to which the kit's CPU backend gives a
meaning; no device is there before it does. The operators that the recipes use are written in plain torch after
torch_npu's public descriptions; any other is named when it is asked for.
"""

import sys
from typing import Any, NoReturn

import torch

from msprobe_megatron.hosts.rehearsal import simulated_device

from . import _C as _C
from . import profiler as profiler
from . import utils as utils
from .operators import (
    npu_apply_adam_w,
    npu_fusion_attention,
    npu_rms_norm,
    npu_rotary_mul,
    npu_scaled_masked_softmax,
    npu_swiglu,
)

__all__ = [
    "npu_apply_adam_w",
    "npu_fusion_attention",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_scaled_masked_softmax",
    "npu_swiglu",
]
__version__ = "2.13.0+stand.in"
npu: Any
if simulated_device.installed():
    npu = sys.modules["torch.npu"]
else:
    npu = torch.cuda
    npu.set_compile_mode = lambda jit_compile=False: None
    sys.modules["torch_npu.npu"] = sys.modules["torch.npu"] = npu
    setattr(torch, "npu", npu)  # noqa: B010  (torch is typed)
    for _owner in (torch.Tensor, torch.nn.Module):
        setattr(_owner, "npu", lambda self, *args, **kwargs: self.cuda(*args, **kwargs))  # noqa: B010


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"torch_npu.{name}: nothing stands in for it in a rehearsal", name=name)
