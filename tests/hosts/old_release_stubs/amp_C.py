"""The two operations on lists of tensors that clipping and scaling of gradients need."""

import torch


def multi_tensor_l2norm(overflow, lists, per_tensor=False):
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]]) if lists[0] else torch.zeros(1)
    return norms.norm().reshape(1), norms if per_tensor else None


def multi_tensor_scale(overflow, lists, scale):
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
        if not torch.isfinite(target).all():
            overflow.fill_(1)
