"""Casts to bfloat16 inside a bfloat16 job, where Megatron computes in float32: each stays within rounding."""

from __future__ import annotations

from typing import Any

import torch

from tests.jobs.compare.faults import Chunks, Fault, around, named, weight


def _softmax(chunks: Chunks) -> None:
    """The softmax of layer 1 adds up in bfloat16."""
    softmax = named(chunks, "decoder.layers.1.self_attention.core_attention.scale_mask_softmax")

    def forward(original: Any, scores: torch.Tensor, mask: torch.Tensor, *more: Any) -> torch.Tensor:
        powers = torch.exp(softmax.mask_func(scores, mask) - scores.amax(-1, keepdim=True))
        return powers / powers.sum(-1, keepdim=True)

    if softmax is not None:
        around(softmax, forward)


def _norm(chunks: Chunks) -> None:
    """The root of the mean square of layer 2 is computed in bfloat16."""
    norm = named(chunks, "decoder.layers.2.pre_mlp_layernorm")

    def forward(original: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight

    if norm is not None:
        around(norm, forward)


def _cross_entropy() -> None:
    """The loss is computed from bfloat16 logits."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    def logits_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits, torch.max(logits, dim=-1)[0]

    VocabParallelCrossEntropy.calculate_logits_max = staticmethod(logits_max)


_kept: list[Any] = []


def _accumulation(chunks: Chunks) -> None:
    """The gradient of one weight is rounded to bfloat16 after every microbatch."""
    value = weight(chunks, "decoder.layers.1.mlp.linear_fc2.weight")
    if value is None:
        return

    def rounded(*unused: Any) -> None:
        value.main_grad.copy_(value.main_grad.bfloat16())

    node = value.expand_as(value).grad_fn.next_functions[0][0]
    node.register_hook(rounded)
    _kept.append(node)


CASTS = {
    "softmax_in_bf16": Fault(ready=_softmax),
    "norm_in_bf16": Fault(ready=_norm),
    "cross_entropy_in_bf16": Fault(before=_cross_entropy),
    "accumulation_in_bf16": Fault(ready=_accumulation),
}
