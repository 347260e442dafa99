"""What CUDA and NPU share: a pinned, asynchronous copy to the host that a recorded event announces. Both
offer the same calls under `torch.cuda` and `torch.npu`, so that one class serves the two.
"""

from __future__ import annotations

from typing import Any

import torch

from .base import Backend, HostCopy


class _PinnedCopy:
    """A copy in flight. The event, not the stream, is waited for: training goes on behind it."""

    def __init__(self, tensor: torch.Tensor, event: Any) -> None:
        self._tensor = tensor
        self._event = event

    def wait(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensor


class AcceleratorBackend(Backend):
    """A device reached through a torch device module (`torch.cuda`, `torch.npu`)."""

    def __init__(self, name: str, module: Any, float_dtype: torch.dtype) -> None:
        self.name = name
        self.float_dtype = float_dtype
        self._module = module

    @property
    def device(self) -> torch.device:
        """The current device of this process."""
        return torch.device(self.name, self._module.current_device())

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Copy into pinned memory on the current stream and record an event behind it.

        The current stream, because the allocator then keeps the source alive until the copy has run.
        """
        source = tensor.detach()
        target = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        target.copy_(source, non_blocking=True)
        event = self._module.Event()
        event.record()
        return _PinnedCopy(target, event)
