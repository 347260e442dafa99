"""The norms, in plain torch; layers that a job without TransformerEngine never makes."""

from __future__ import annotations

import torch
from torch import nn


class LayerNorm(nn.LayerNorm):
    def __init__(self, hidden_size, eps=1e-5, sequence_parallel=False, params_dtype=None, **_):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5, sequence_parallel=False, params_dtype=None, **_):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class _Absent(nn.Module):
    def __init__(self, *args, **kwargs):
        raise RuntimeError(f"{type(self).__name__}: TransformerEngine is not here")


class Linear(_Absent):
    pass


class LayerNormLinear(_Absent):
    pass


class DotProductAttention(_Absent):
    pass
