"""The backend of plain host memory: a copy is a clone and has already arrived."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Backend, HostCopy


@dataclass(frozen=True)
class _Arrived:
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


class HostBackend(Backend):
    """CPU training, real or emulated by `backends.cpu`."""

    name = "cpu"

    @property
    def device(self) -> torch.device:
        """Host memory has one device."""
        return torch.device("cpu")

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Clone at once."""
        return _Arrived(tensor.detach().clone(memory_format=torch.contiguous_format))
