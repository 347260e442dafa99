"""Ranks with a process group of the emulated "nccl", for tests that need no training script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.support import forked
from tests.support.forked import RankFailed

__all__ = ["RankFailed", "run_forked"]


def run_forked(world_size: int, function: Callable[[], Any], timeout: float = 60.0) -> list[Any]:
    """Call `function` on every rank, its process group ready, and return the results in order of rank."""
    return forked.run_forked(world_size, _in_group, function, timeout=timeout)


def _in_group(function: Callable[[], Any]) -> Any:
    dist.init_process_group("nccl")
    result = function()
    dist.barrier()
    dist.destroy_process_group()
    return result
