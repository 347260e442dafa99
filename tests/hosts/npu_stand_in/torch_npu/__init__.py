"""Stands in for torch_npu where there is no NPU, so that ModelLink and MindSpeed can be imported and trained there.

`torch.npu` is `torch.cuda`, to which the kit's CPU backend gives a meaning; no device is there before it does. The
operators that the recipes use are written in plain torch after torch_npu's public descriptions.
"""

import sys

import torch

from . import _C, profiler, utils  # noqa: F401
from .operators import (  # noqa: F401
    npu_apply_adam_w,
    npu_fusion_attention,
    npu_rms_norm,
    npu_rotary_mul,
    npu_scaled_masked_softmax,
    npu_swiglu,
)

__version__ = "2.13.0+stand.in"
npu = torch.npu = sys.modules["torch_npu.npu"] = sys.modules["torch.npu"] = torch.cuda
npu.set_compile_mode = lambda jit_compile=False: None
torch.Tensor.npu = lambda self, *args, **kwargs: self.cuda(*args, **kwargs)
torch.nn.Module.npu = lambda self, *args, **kwargs: self.cuda(*args, **kwargs)
