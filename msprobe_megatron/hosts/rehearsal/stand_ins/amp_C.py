"""The two operations on lists of tensors that clipping and scaling of gradients need."""

import torch
from torch import Tensor


def multi_tensor_l2norm(
    overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The norm of all tensors together, and of each where asked."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]]) if lists[0] else torch.zeros(1)
    return norms.norm().reshape(1), norms if per_tensor else None


def multi_tensor_scale(overflow: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    """Scale the first list into the second; `overflow` becomes 1 where a result is not finite."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
        if not torch.isfinite(target).all():
            overflow.fill_(1)
