"""Who am I: the coordinates of a rank over every parallel axis, read from Megatron's own groups.

Nothing here communicates. The table of all ranks is derived from the sizes by Megatron's placement rule and then
checked by every rank against what its own groups say.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "SLURM_JOB_ID")
AXES = ("tp", "pp", "dp", "cp", "ep", "etp", "edp")

# axis -> (rank getter, size getter, keyword arguments) of megatron.core.parallel_state.
# Getters that a release does not have mean that the axis does not exist there: rank 0 of 1.
_GETTERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tp": ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size", {}),
    "pp": ("get_pipeline_model_parallel_rank", "get_pipeline_model_parallel_world_size", {}),
    "dp": ("get_data_parallel_rank", "get_data_parallel_world_size", {}),
    "cp": ("get_context_parallel_rank", "get_context_parallel_world_size", {}),
    "ep": ("get_expert_model_parallel_rank", "get_expert_model_parallel_world_size", {}),
    "etp": ("get_expert_tensor_parallel_rank", "get_expert_tensor_parallel_world_size", {}),
    "edp": ("get_expert_data_parallel_rank", "get_expert_data_parallel_world_size", {}),
}


@dataclass(frozen=True)
class Coordinates:
    """Rank and sizes over each axis; an axis that is not used is rank 0 of 1.

    Example::

        >>> c = Coordinates(rank=3, world=4, tp=1, tp_size=2, pp=1, pp_size=2)
        >>> c.of("tp"), c.size("tp"), c.size("cp")
        (1, 2, 1)
    """

    rank: int = 0
    world: int = 1
    tp: int = 0
    pp: int = 0
    dp: int = 0
    cp: int = 0
    ep: int = 0
    etp: int = 0
    edp: int = 0
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    etp_size: int = 1
    edp_size: int = 1

    def of(self, axis: str) -> int:
        """Rank of this process on `axis`."""
        return int(getattr(self, axis))

    def size(self, axis: str) -> int:
        """Number of ranks on `axis`."""
        return int(getattr(self, f"{axis}_size"))

    def sizes(self) -> dict[str, int]:
        """Sizes of all axes by name."""
        return {axis: self.size(axis) for axis in AXES}

    def position(self) -> dict[str, int]:
        """Ranks on all axes by name."""
        return {axis: self.of(axis) for axis in AXES}

    def as_dict(self) -> dict[str, int]:
        """Plain dictionary for run.json."""
        return asdict(self)


def parallel_state() -> Any | None:
    """Megatron's parallel_state if the host has imported and initialised it, else None."""
    module = sys.modules.get("megatron.core.parallel_state")
    if module is None or not module.model_parallel_is_initialized():
        return None
    return module


def current() -> Coordinates:
    """Coordinates of this process; works without Megatron and without torch.distributed too."""
    rank, world = _global_rank()
    state = parallel_state()
    if state is None:
        return Coordinates(rank=rank, world=world, dp=rank, dp_size=world, edp=rank, edp_size=world)
    values: dict[str, int] = {}
    for axis, (rank_getter, size_getter, kwargs) in _GETTERS.items():
        if hasattr(state, rank_getter) and hasattr(state, size_getter):
            values[axis] = int(getattr(state, rank_getter)(**kwargs))
            values[f"{axis}_size"] = int(getattr(state, size_getter)(**kwargs))
    return Coordinates(rank=rank, world=world, **values)


def from_groups(groups: Any) -> Coordinates:
    """Coordinates of this process in process groups that are handed over, by axis; other axes are not used.

    Example::

        from_groups({"tp": tensor_group, "dp": data_group})
    """
    from torch import distributed

    values: dict[str, int] = {}
    for axis in AXES:
        group = groups.get(axis) if isinstance(groups, dict) else getattr(groups, axis, None)
        if group is not None:
            values[axis] = int(distributed.get_rank(group))
            values[f"{axis}_size"] = int(distributed.get_world_size(group))
    rank, world = _global_rank()
    return Coordinates(rank=rank, world=world, **values)


def job_identity(world: int) -> str:
    """What all ranks of a job have in common; another job, or a restart with other ranks, has another one."""
    return " ".join([f"{world} ranks", *(f"{name}={os.environ.get(name, '')}" for name in _JOB)])


def environment_number(name: str) -> int:
    """A number that torchrun and its kin tell by the environment; 0 where they do not."""
    return int(os.environ.get(name, "0") or 0)


def environment_rank() -> int:
    """Global rank before any process group exists, as torchrun and its kin tell it."""
    return environment_number("RANK")


def _global_rank() -> tuple[int, int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return environment_rank(), int(os.environ.get("WORLD_SIZE", "1") or 1)


def expected(own: Coordinates, rank: int) -> Coordinates:
    """Coordinates that Megatron's default placement (tp-cp-ep-dp-pp) gives to another rank of the same job.

    Example::

        >>> own = Coordinates(rank=0, world=4, tp_size=2, pp_size=2)
        >>> c = expected(own, 3); (c.tp, c.pp)
        (1, 1)
    """
    rest, position = rank, {}
    for axis in ("tp", "cp", "dp", "pp"):
        rest, position[axis] = divmod(rest, own.size(axis))
    # Experts have a grid of their own inside a pipeline stage: etp fastest, then ep, then expert data parallel.
    rest = rank % max(1, own.world // own.pp_size)
    for axis in ("etp", "ep", "edp"):
        rest, position[axis] = divmod(rest, own.size(axis))
    return replace(own, rank=rank, **position)


def all_ranks(own: Coordinates) -> list[Coordinates] | None:
    """Every rank's coordinates, or None when this rank does not stand where the default placement puts it."""
    if expected(own, own.rank) != own:
        return None
    return [expected(own, rank) for rank in range(own.world)]
