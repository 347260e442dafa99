"""What Megatron leaves to TransformerEngine's attention, for its own DotProductAttention: heads of keys and values of
other sizes (multi-latent attention), and packed sequences ([t, heads, dim] with the ends of the documents).
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch

from msprobe_megatron.job.devices.megatron_on_cpu import context_parallel


def document_mask(ends: torch.Tensor, length: int) -> torch.Tensor:
    """Causal mask (True = hidden) of packed documents, from the cumulative lengths: [1, 1, length, length].

    Example:
        >>> document_mask(torch.tensor([0, 1, 3]), 3)[0, 0].int().tolist()
        [[0, 1, 1], [1, 0, 1], [1, 0, 0]]

    """
    positions = torch.arange(length, device=ends.device)
    document = torch.bucketize(positions, ends[1:], right=True)
    visible = (document[:, None] == document[None, :]) & (positions[:, None] >= positions[None, :])
    return ~visible[None, None]


def fix(module: ModuleType) -> None:
    """Let DotProductAttention take `k_channels`, `v_channels` and packed sequences; then context parallelism."""
    cls = module.DotProductAttention
    build, attend = cls.__init__, cls.forward
    known = inspect.signature(build).parameters

    @functools.wraps(build)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        channels = {name: kwargs.pop(name, None) for name in ("k_channels", "v_channels") if name not in known}
        build(self, config, *args, **kwargs)
        if channels.get("v_channels"):
            self.hidden_size_per_partition = channels["v_channels"] * self.num_attention_heads_per_partition

    @functools.wraps(attend)
    def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        packed = kwargs.get("packed_seq_params")
        if packed is None or getattr(packed, "qkv_format", None) != "thd":
            return attend(self, query, key, value, attention_mask, *args, **kwargs)
        mask = document_mask(packed.cu_seqlens_q, query.shape[0])
        batched = [tensor.unsqueeze(1) for tensor in (query, key, value)]
        return attend(self, *batched, mask, *args, **{**kwargs, "packed_seq_params": None})

    cls.__init__, cls.forward = __init__, forward
    context_parallel.fix(module)
