"""megatron.core.tensor_parallel.random: activation recomputation.

A recomputed forward runs inside backward, possibly of a microbatch that is not the newest. The checkpoint's own
context carries the microbatch from the forward to its repetition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msprobe_megatron.job.patching.patch_set import Patch

_RANDOM = "megatron.core.tensor_parallel.random"


def _remember(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.msprobe_moment = events.moment()
        return original(ctx, *args)

    return forward


def _repeat(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    def backward(ctx: Any, *args: Any) -> Any:
        with events.recomputing(getattr(ctx, "msprobe_moment", None)):
            return original(ctx, *args)

    return backward


def _repeat_without_output(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    def recompute(self: Any, *args: Any) -> Any:
        with events.recomputing(getattr(getattr(self, "ctx", None), "msprobe_moment", None)):
            return original(self, *args)

    return recompute


PATCHES = [
    Patch(
        "recompute.CheckpointFunction.forward",
        (f"{_RANDOM}:CheckpointFunction.forward",),
        _remember,
        phase="recording",
        why="keeps the microbatch for its recomputation",
    ),
    Patch(
        "recompute.CheckpointFunction.backward",
        (f"{_RANDOM}:CheckpointFunction.backward",),
        _repeat,
        phase="recording",
        why="a forward inside backward is phase recompute of its own microbatch",
    ),
    Patch(
        "recompute.CheckpointWithoutOutputFunction.forward",
        (f"{_RANDOM}:CheckpointWithoutOutputFunction.forward",),
        _remember,
        phase="recording",
        why="the same for checkpoints that drop their output",
    ),
    Patch(
        "recompute.CheckpointWithoutOutput._recompute",
        (f"{_RANDOM}:CheckpointWithoutOutput._recompute",),
        _repeat_without_output,
        phase="recording",
        why="the same for checkpoints that drop their output",
    ),
]
