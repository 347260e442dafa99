"""How the elements of a strided tensor lie in memory. Nothing here reads a value.

The order of elements does not matter to a statistic: a transposed tensor is read in memory order, and an expanded one
is read once and counted many times.
"""

from __future__ import annotations

import torch


def compact(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a tensor with the same elements and how often each stands in ``x``, without copying.

    Expanded (stride 0) dimensions are cut to one; what then fills its memory without holes becomes flat.
    """
    times = 1
    for dim in range(x.dim() - 1, -1, -1):
        size = x.size(dim)
        if size > 1 and x.stride(dim) == 0:
            x = x.select(dim, 0)
            times *= size
    if not x.is_contiguous() and is_dense(x):
        x = x.as_strided((x.numel(),), (1,))
    return x, times


def is_dense(x: torch.Tensor) -> bool:
    """Say whether the elements fill one gapless stretch of memory, each once, in whatever order.

    Example::

        >>> is_dense(torch.zeros(4, 5).t())
        True
        >>> is_dense(torch.zeros(4, 5)[:, :3])
        False
    """
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
