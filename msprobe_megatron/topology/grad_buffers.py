"""Which part of a parameter's gradient this rank holds after reduction.

Megatron's DDP keeps gradients in contiguous buffers cut into buckets. With the distributed optimizer a bucket is
reduce-scattered, so that outside its own range a rank is left with unreduced numbers that must not be read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def reduced_range(chunk: nn.Module, parameter: nn.Parameter) -> tuple[int, int] | None:
    """Range [start, stop) of the flattened parameter that is reduced here; None means all of it.

    An empty range (start == stop) says that another data-parallel rank holds all of it.
    """
    config = getattr(chunk, "ddp_config", None)
    if config is None or not getattr(config, "use_distributed_optimizer", False):
        return None
    for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ())):
        place = getattr(buffer, "param_index_map", {}).get(parameter)
        if place is not None:
            return _intersection(buffer, place)
    return None


def _intersection(buffer: Any, place: tuple[int, int, int]) -> tuple[int, int]:
    start, stop, bucket_id = place
    bucket = buffer.buckets[bucket_id]
    group = buffer.data_parallel_group
    share = bucket.grad_data.numel() // int(torch.distributed.get_world_size(group))
    first = bucket.offset + share * int(torch.distributed.get_rank(group))
    low, high = max(start, first), min(stop, first + share)
    return (low - start, high - start) if high > low else (0, 0)
