"""The c10d backend "hccl" of the simulated device: gloo carries the bytes, a stream of the group orders them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def register(loaded: Any) -> None:
    """Make ``init_process_group("hccl")`` and ``new_group(backend="hccl")`` work for tensors of the device."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return loaded.hccl(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)

    dist.Backend.register_backend("hccl", create, devices=["npu"])
