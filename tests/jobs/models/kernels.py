"""Kernels that megatron-core takes from other packages, in plain torch: mamba_ssm's scan, einops, fla's l2norm.

Installed in a forked rank before Megatron's modules that need them are imported, so that Megatron's own classes run.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F

_PATTERNS = {
    "l b d -> b l d": lambda x: x.transpose(0, 1),
    "b l d -> l b d": lambda x: x.transpose(0, 1),
    "d 1 w -> d w": lambda x: x.squeeze(1),
}


def _rearrange(tensor: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    return _PATTERNS[pattern](tensor)


def scan(
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    decay: torch.Tensor,
    D: torch.Tensor,  # noqa: N803 (mamba_ssm's name)
    headdim: int,
    ngroups: int,
    **others: Any,
) -> torch.Tensor:
    """Mamba-2: causal convolution of [x|B|C], selective scan, and the gate z; [b, l, d] to [b, l, heads * dim]."""
    batch, length, _ = zxbcdt.shape
    heads = decay.numel()
    inner = heads * headdim
    z, xbc, dt = zxbcdt.split([inner, weight.shape[0], heads], -1)
    padded = F.pad(xbc.transpose(1, 2), (weight.shape[1] - 1, 0))
    xbc = F.silu(F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])).transpose(1, 2)
    states = (weight.shape[0] - inner) // (2 * ngroups)
    x, b, c = xbc.split([inner, ngroups * states, ngroups * states], -1)
    x = x.reshape(batch, length, heads, headdim).float()
    b, c = (t.reshape(batch, length, ngroups, states).repeat_interleave(heads // ngroups, 2).float() for t in (b, c))
    dt = F.softplus(dt.float() + dt_bias)
    state, found = x.new_zeros(batch, heads, headdim, states), []
    for at in range(length):
        state = state * (dt[:, at] * decay).exp()[..., None, None]
        state = state + (dt[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
        found.append((state * c[:, at, :, None]).sum(-1) + D[:, None].float() * x[:, at])
    y = torch.stack(found, 1).reshape(batch, length, inner).to(zxbcdt.dtype)
    return y * F.silu(z)


class _GatedNorm(torch.nn.Module):
    """RMS norm over groups of channels."""

    def __init__(self, width: int, eps: float, group_size: int, dtype: torch.dtype, **others: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = x.float().unflatten(-1, (-1, self.group_size))
        scaled = grouped * (grouped.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return scaled.flatten(-2).to(x.dtype) * self.weight


def _module(name: str, **members: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    vars(sys.modules[name]).update(members)


def install() -> None:
    """Put the kernels where Megatron looks for them, and import what uses them."""
    _module("einops", rearrange=_rearrange, repeat=None)
    _module("mamba_ssm.ops.triton.selective_state_update", selective_state_update=None)
    _module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=_GatedNorm)
    _module(
        "mamba_ssm.ops.triton.ssd_combined",
        mamba_chunk_scan_combined=None,
        mamba_split_conv1d_scan_combined=scan,
    )
    _module("fla.modules.l2norm", l2norm=lambda x: F.normalize(x, dim=-1, eps=1e-6))
    _module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=None)
    for name in ("mamba_mixer", "mamba_block", "gated_delta_net"):
        sys.modules.pop(f"megatron.core.ssm.{name}", None)
        importlib.import_module(f"megatron.core.ssm.{name}")
