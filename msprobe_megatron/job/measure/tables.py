"""Small tables of the kit's own on a device, without making the host wait for it."""

from __future__ import annotations

import torch


def on_device(table: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy of a host tensor on ``device``, under way on the current stream when this returns.

    Through pinned memory, which the allocator keeps until the copy has run. Where that is not to be had (torch_npu in
    a thread of the autograd engine) the copy waits.

    Example::

        >>> on_device(torch.tensor([1, 2]), torch.device("cpu"))
        tensor([1, 2])
    """
    table = table if dtype is None else table.to(dtype)
    if device.type == "cpu":
        return table
    if not table.numel():
        return torch.empty_like(table, device=device)  # empty memory cannot be pinned
    try:
        return table.pin_memory().to(device, non_blocking=True)
    except RuntimeError:
        return table.to(device)
