"""Any strided tensor as a few flat pieces whose statistics add up to its own.

First stage of a measurement: order of elements does not matter to a statistic, so a transposed tensor is read
in memory order, an expanded one is read once and counted many times, and only a tensor with holes is copied,
a bounded piece at a time. Nothing here reads a value.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

COPY_LIMIT = 1 << 20
"""Elements that may be copied at once when a tensor has holes between its elements."""


def compact(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a tensor with the same elements and how often each stands in ``x``, without copying.

    Expanded (stride 0) dimensions are cut to one; what then fills its memory without holes becomes flat.

    Example::

        mask, times = compact(torch.ones(8, 1).expand(8, 100))   # mask.shape == (8,), times == 100
        turned, times = compact(torch.rand(4, 5).t())            # turned.shape == (20,), times == 1
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

        is_dense(torch.zeros(4, 5).t())      # True
        is_dense(torch.zeros(4, 5)[:, :3])   # False
    """
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def flat_pieces(x: torch.Tensor, limit: int = COPY_LIMIT) -> Iterator[torch.Tensor]:
    """Yield 1-D contiguous tensors that together hold each element of ``x`` once; none copies over ``limit``.

    Example::

        total = sum(piece.sum() for piece in flat_pieces(torch.rand(4, 6)[:, ::2]))
    """
    if x.is_contiguous():
        yield x.view(-1)
    elif x.numel() <= limit:
        yield x.reshape(-1)
    else:
        # Cutting the widest dimension always ends: a piece of one element is below any limit.
        dim = max(range(x.dim()), key=x.size)
        half = x.size(dim) // 2
        yield from flat_pieces(x.narrow(dim, 0, half), limit)
        yield from flat_pieces(x.narrow(dim, half, x.size(dim) - half), limit)
