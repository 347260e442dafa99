"""The norms, in plain torch; layers that a job without TransformerEngine never makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _mark(module: nn.Module, sequence_parallel: bool) -> None:
    """What Megatron asks a norm's parameters when it reduces their gradients."""
    for parameter in module.parameters():
        setattr(parameter, "sequence_parallel", sequence_parallel)  # noqa: B010


class LayerNorm(nn.LayerNorm):
    """torch's own."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, sequence_parallel: bool = False, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        _mark(self, sequence_parallel)


class RMSNorm(nn.Module):
    """Root mean square over the last dimension."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, sequence_parallel: bool = False, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        _mark(self, sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """The normed input times the weight."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class _Absent(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{type(self).__name__}: TransformerEngine is not here")


class Linear(_Absent):
    """A base class of Megatron's; never made."""


class LayerNormLinear(_Absent):
    """A base class of Megatron's; never made."""


class DotProductAttention(_Absent):
    """A base class of Megatron's; never made."""
