"""The part of a parameter's gradient that this rank holds after reduction.

Megatron's DDP keeps gradients in contiguous buffers divided into buckets. With the distributed optimizer a bucket is
reduce-scattered: outside of its own range a rank holds unreduced values that must not be read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


def reduced_range(chunk: nn.Module, parameter: nn.Parameter) -> tuple[int, int] | None:
    """Range [start, stop) of the flattened parameter that is reduced here; None means all of it.

    An empty range (start == stop) means that other data-parallel ranks hold all of it.
    """
    if not getattr(settings(chunk), "use_distributed_optimizer", False):
        return None
    for buffer in _buffers(chunk):
        place = getattr(buffer, "param_index_map", {}).get(parameter)
        if place is not None:
            return _intersection(buffer, place)
    return None


def settings(chunk: nn.Module) -> Any | None:
    """The settings of Megatron's DDP; in 0.6 they are attributes of the module itself. None for any other module."""
    config = getattr(chunk, "ddp_config", None)
    return chunk if config is None and hasattr(chunk, "use_distributed_optimizer") else config


def _buffers(chunk: nn.Module) -> list[Any]:
    """The buffers of Megatron's DDP; in its other wrappers the name is torch's method, or missing."""
    found = (getattr(chunk, "buffers", None), getattr(chunk, "expert_parallel_buffers", None))
    return [buffer for buffers in found if isinstance(buffers, list | tuple) for buffer in buffers]


class Segment(NamedTuple):
    """The gradient of a parameter in its bucket: elements [start, stop) of ``bucket.grad_data``.

    ``part`` is the range of the flattened parameter that is reduced here, as `reduced_range` says.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    part: tuple[int, int] | None


class BucketSegments(NamedTuple):
    """A bucket of Megatron's DDP, the segments in it, and whether it is reduced over several ranks."""

    bucket: Any
    segments: list[Segment]
    shared: bool


def buckets(chunk: nn.Module) -> list[BucketSegments]:
    """The buckets of a chunk, including those of experts, each with its data-parallel group.

    Without Megatron's DDP there are none.
    """
    if settings(chunk) is None:
        return []
    found: list[BucketSegments] = []
    for buffer in _buffers(chunk):
        segments: dict[int, list[Segment]] = {index: [] for index in range(len(buffer.buckets))}
        for parameter, (start, stop, bucket_id) in buffer.param_index_map.items():
            offset = buffer.buckets[bucket_id].offset
            part = reduced_range(chunk, parameter)
            segments[bucket_id].append(Segment(parameter, start - offset, stop - offset, part))
        shared = int(torch.distributed.get_world_size(buffer.data_parallel_group)) > 1
        for index, bucket in enumerate(buffer.buckets):
            found.append(BucketSegments(bucket, sorted(segments[index], key=lambda s: s.start), shared))
    return found


def _intersection(buffer: Any, place: tuple[int, int, int]) -> tuple[int, int]:
    start, stop, bucket_id = place
    bucket = buffer.buckets[bucket_id]
    group = buffer.data_parallel_group
    share = bucket.grad_data.numel() // int(torch.distributed.get_world_size(group))
    first = bucket.offset + share * int(torch.distributed.get_rank(group))
    low, high = max(start, first), min(stop, first + share)
    return (low - start, high - start) if high > low else (0, 0)
