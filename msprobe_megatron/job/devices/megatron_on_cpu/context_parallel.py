"""Context parallelism for Megatron's own DotProductAttention, which leaves it to TransformerEngine. A rank
holds chunks r and 2*cp-1-r of the 2*cp chunks of the sequence. Its queries stay where they are; keys and
values are gathered and put into sequence order, and the unmodified attention runs on them with the mask rows
of the local queries, so that its modules see scores of [b, np, s_local, s].
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


@functools.lru_cache(maxsize=16)
def local_positions(length: int, rank: int, size: int) -> torch.Tensor:
    """Positions in the whole sequence of the tokens that CP rank `rank` of `size` holds.

    Example:
        >>> local_positions(8, 0, 2)
        tensor([0, 1, 6, 7])

    """
    chunks = torch.arange(length).view(2 * size, -1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


@functools.lru_cache(maxsize=16)
def _sequence_order(length: int, size: int) -> torch.Tensor:
    """Index that takes the ranks' tokens, laid end to end, into sequence order."""
    return torch.cat([local_positions(length, rank, size) for rank in range(size)]).argsort()


@functools.lru_cache(maxsize=16)
def causal_rows(length: int, rank: int, size: int) -> torch.Tensor:
    """Rows of the causal mask (True = hidden) for the local queries: [1, 1, s_local, s]."""
    rows = local_positions(length, rank, size)
    return (torch.arange(length)[None, :] > rows[:, None])[None, None]


class _GatherSequence(torch.autograd.Function):
    """[s_local, ...] on each rank to [s, ...] in sequence order; backward sums what every rank added."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: Any) -> torch.Tensor:
        size = dist.get_world_size(group)
        parts = [torch.empty(local.shape, dtype=local.dtype, device=local.device) for _ in range(size)]
        dist.all_gather(parts, local.contiguous(), group=group)
        ctx.group = group
        return torch.cat(parts)[_sequence_order(local.shape[0] * size, size)]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        return total[local_positions(total.shape[0], rank, size)], None


def _gather(local: torch.Tensor, group: Any) -> torch.Tensor:
    gathered: torch.Tensor = _GatherSequence.apply(local, group)  # type: ignore[no-untyped-call]
    return gathered


def _group(attention: Any) -> Any:
    group = getattr(getattr(attention, "pg_collection", None), "cp", None)
    if group is None:
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
    return group


def _mask(attention: Any, given: torch.Tensor | None, length: int, group: Any) -> torch.Tensor | None:
    """Keep a mask that already is [.., s_local, s], as Megatron cuts it; else build causal rows, or none.

    Any other mask is ignored by causal attention, which is what TransformerEngine does too.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if given is not None and tuple(given.shape[-2:]) == (length // size, length):
        return given
    kind = attention.attn_mask_type.name
    if kind == "no_mask":
        return None
    if kind != "causal":
        shape = None if given is None else tuple(given.shape)
        raise NotImplementedError(
            f"context parallelism on CPU: attention mask type {kind!r} with a mask of shape {shape}; "
            f"accepted: causal, no_mask, or a mask of shape [.., {length // size}, {length}]"
        )
    return causal_rows(length, rank, size)


def fix(module: ModuleType) -> None:
    """Let DotProductAttention be built with context_parallel_size > 1 and gather in its forward."""
    cls = module.DotProductAttention
    build, attend = cls.__init__, cls.forward

    @functools.wraps(build)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        # The constructor asserts 1 and makes no other use of it.
        asked, config.context_parallel_size = config.context_parallel_size, 1
        try:
            build(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = asked
        if asked > 1 and getattr(self.scale_mask_softmax, "window_size", None) is not None:
            raise NotImplementedError("context parallelism on CPU: a sliding window (window_size) is not supported")

    @functools.wraps(attend)
    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.config.context_parallel_size > 1:
            group = _group(self)
            key, value = _gather(key, group), _gather(value, group)
            mask = _mask(self, attention_mask, key.shape[0], group)
            attention_mask = None if mask is None else mask.to(key.device)
        return attend(self, query, key, value, attention_mask, *args, **kwargs)

    cls.__init__, cls.forward = __init__, forward
