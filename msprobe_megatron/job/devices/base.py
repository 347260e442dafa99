"""Device backends: the current device, the widest accumulator type, and an asynchronous copy to the host.

`record` is the only caller of `to_host`. In host memory a copy is a clone and complete at once; CUDA and NPU copy to
pinned memory and record an event, through the same calls under `torch.cuda` and `torch.npu`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class BackendError(Exception):
    """A device was requested that is not there, or the CPU emulation where it must not run."""


class HostCopy(Protocol):
    """A copy on its way to the host."""

    def wait(self) -> torch.Tensor:
        """Block until the copy has arrived and return it; calling twice returns the same tensor."""


class Backend(ABC):
    """One kind of device.

    Example:
        >>> from msprobe_megatron.job.devices import select
        >>> backend = select("cpu")
        >>> backend.to_host(torch.ones(2, device=backend.device)).wait()
        tensor([1., 1.])

    """

    name: str
    #: widest floating-point type in which the device reduces natively
    float_dtype: torch.dtype = torch.float64

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this process, looked up on every access: Megatron sets it after start-up."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Start copying `tensor` to the host; later changes of `tensor` do not reach the copy."""


@dataclass(frozen=True)
class _Arrived:
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


class HostBackend(Backend):
    """CPU training, real or emulated by `megatron_on_cpu`."""

    name = "cpu"

    @property
    def device(self) -> torch.device:
        """Host memory has one device."""
        return torch.device("cpu")

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Clone at once."""
        return _Arrived(tensor.detach().clone(memory_format=torch.contiguous_format))


class _PinnedCopy:
    """A copy in flight. `wait` synchronizes with the event, not the stream, which training continues to fill."""

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
