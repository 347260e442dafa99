"""megatron.core.distributed: just before the gradients of a bucket are reduced over the data-parallel ranks.

The one place where a rank still has its own gradient, whether or not the reduction overlaps with the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msprobe_megatron.job.patching.patch_set import Patch

_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"


def _start(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        # In the first batch of an overlapped run it is called again for a reduction that is in flight: a no-op, and
        # the buffer no longer holds this rank's own gradient.
        running = getattr(self, "grad_reduce_handle", None) is not None
        if not (running and getattr(self, "is_first_batch", False)):
            events.before_reduction(getattr(self, "buckets", (self,)))
        return original(self, *args, **kwargs)

    return start_grad_sync


PATCHES = [
    Patch(
        "data_parallel.start_grad_sync",
        (f"{_BUFFERS}:_ParamAndGradBucketGroup.start_grad_sync", f"{_BUFFERS}:Bucket.start_grad_sync"),
        _start,
        phase="gradients",
        why="gradients of a bucket before reduction",
    )
]
