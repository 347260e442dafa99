"""What a device must offer to the kit: where its tensors live, how wide its accumulators may be, and a way to
bring a block of numbers to the host without stopping the device. `record` is the only caller of `to_host`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch


class BackendError(Exception):
    """A device was asked for that is not there, or an emulation where it must not run."""


class HostCopy(Protocol):
    """A copy on its way to the host."""

    def wait(self) -> torch.Tensor:
        """Block until the copy has arrived and return it; calling twice returns the same tensor."""


class Backend(ABC):
    """One kind of device.

    Example:
        >>> from msprobe_megatron.backends import select
        >>> backend = select("cpu")
        >>> backend.to_host(torch.ones(2, device=backend.device)).wait()
        tensor([1., 1.])

    """

    name: str
    #: widest floating type the device reduces in without emulation
    float_dtype: torch.dtype = torch.float64

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device this process computes on, asked anew each time: Megatron chooses it after start-up."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Start copying `tensor` to the host; later changes of `tensor` do not reach the copy."""
