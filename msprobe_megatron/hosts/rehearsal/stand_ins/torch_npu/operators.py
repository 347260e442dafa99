"""The fused operators of torch_npu that pre-training recipes use, in plain torch."""

import math
from typing import Any

import torch
from torch import Tensor


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension, and the reciprocal of the root."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale).to(x.dtype) * gamma, scale


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """The first half of `dim`, activated, times the second."""
    gate, value = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * value


def npu_rotary_mul(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding by halves."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def npu_scaled_masked_softmax(
    x: Tensor, mask: Tensor | None, scale: float = 1.0, fixed_triu_mask: bool = False
) -> Tensor:
    """Softmax of scaled scores; what is True in the mask is not seen."""
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    scaled = x.float() * scale
    return torch.softmax(scaled if mask is None else scaled.masked_fill(mask, -10000.0), -1).to(x.dtype)


def _by_heads(x: Tensor, heads: int, layout: str) -> Tensor:
    """[batch, heads, sequence, channels], whatever the layout."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    x = x.transpose(0, 1) if layout == "SBH" else x
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    **options: Any,
) -> tuple[Tensor]:
    """Attention in one operator; what is True in the mask is not seen. Sparse modes: 2 and 3 causal, 4 a band."""
    if options.get("keep_prob", 1.0) < 1.0 or input_layout not in ("SBH", "BSH", "BNSD", "BSND"):
        raise NotImplementedError(f"stand-in of npu_fusion_attention: {input_layout}, {options}")
    channels = query.shape[-1] // head_num if input_layout in ("SBH", "BSH") else query.shape[-1]
    groups = key.shape[-1] // channels if input_layout in ("SBH", "BSH") else None
    q = _by_heads(query, head_num, input_layout)
    k, v = (_by_heads(x, groups or head_num, input_layout) for x in (key, value))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if pse is not None:
        scores = scores + pse.float()
    rows, columns = scores.shape[-2:]
    hidden: Tensor | None
    if options.get("sparse_mode", 0) in (2, 3):
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1)
    elif options.get("sparse_mode", 0) == 4:
        every = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
        before, after = int(options.get("pre_tockens", rows)), int(options.get("next_tockens", 0))
        hidden = every.triu(after + 1) | every.tril(-before - 1)
    else:
        hidden = atten_mask.bool() if atten_mask is not None else None
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
    out = torch.matmul(torch.softmax(scores, -1), v.float()).to(query.dtype)
    if input_layout == "BNSD":
        return (out,)
    out = out.transpose(1, 2)
    if input_layout == "BSND":
        return (out,)
    out = out.flatten(-2)
    return (out.transpose(0, 1).contiguous() if input_layout == "SBH" else out,)


def npu_apply_adam_w(
    power1: float,
    power2: float,
    lr: float,
    decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad: Tensor,
    _max_norm: Any,
    _amsgrad: bool,
    maximize: bool,
    *,
    out: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of AdamW in place; the powers are those of the step before."""
    weight, first, second = out
    grad = -grad if maximize else grad
    weight.mul_(1 - lr * decay)
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (second.sqrt() / math.sqrt(1 - power2 * beta2)).add_(eps)
    weight.addcdiv_(first, denominator, value=-lr / (1 - power1 * beta1))
    return weight, first, second
