"""The coordinates of a rank on every parallel axis, read from Megatron's own groups.

Nothing here communicates. The table of all ranks is derived from the sizes by Megatron's placement rule; every rank
checks it against its own groups.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "SLURM_JOB_ID")
AXES = ("tp", "pp", "dp", "cp", "ep", "etp", "edp")

# axis -> (rank getter, size getter, keyword arguments) of megatron.core.parallel_state.
# A getter that a release does not have means that the axis does not exist there: rank 0 of 1. But see `_older`.
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
    """Coordinates of this process; also without Megatron or torch.distributed."""
    rank, world = _global_rank()
    state = parallel_state()
    if state is None:
        return Coordinates(rank=rank, world=world, dp=rank, dp_size=world, edp=rank, edp_size=world)
    values: dict[str, int] = {}
    for axis, (rank_getter, size_getter, kwargs) in _GETTERS.items():
        if hasattr(state, rank_getter) and hasattr(state, size_getter):
            values[axis] = int(getattr(state, rank_getter)(**kwargs))
            values[f"{axis}_size"] = int(getattr(state, size_getter)(**kwargs))
    return Coordinates(rank=rank, world=world, **{**_older(state, values), **values})


def _older(state: Any, values: dict[str, int]) -> dict[str, int]:
    """The axes of experts in releases before 0.10, which cut experts like any other layer and have no getter for it."""
    # What later releases take if nothing else is asked for; `expert_grid` looks at the experts themselves.
    found = {"etp": values.get("tp", 0), "etp_size": values.get("tp_size", 1)}
    group = _data_group_of_experts(state)
    if group is not None:
        from torch import distributed

        found["edp"] = int(distributed.get_rank(group))
        found["edp_size"] = int(distributed.get_world_size(group))
    return found


def _data_group_of_experts(state: Any) -> Any:
    getter = getattr(state, "get_data_modulo_expert_parallel_group", None)
    if getter is None or hasattr(state, "get_expert_data_parallel_rank"):
        return None
    try:
        return getter(with_context_parallel=True)
    except (
        TypeError
    ):  # 0.6 and 0.7, where experts are not spread if the context is cut: replicated like any other layer
        spread = state.get_expert_model_parallel_world_size() > 1
        return getter() if spread else state.get_data_parallel_group(with_context_parallel=True)


def from_groups(groups: Any) -> Coordinates:
    """Coordinates of this process in the given process groups, by axis; an axis without a group has size 1."""
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
    """An identifier that all ranks of a job share, and that another job or a restart with other ranks does not."""
    return " ".join([f"{world} ranks", *(f"{name}={os.environ.get(name, '')}" for name in _JOB)])


def environment_number(name: str) -> int:
    """An integer that torchrun and similar launchers set in the environment; 0 if it is not set."""
    return int(os.environ.get(name, "0") or 0)


def environment_rank() -> int:
    """Global rank before any process group exists, as set by torchrun and similar launchers."""
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
    # Experts have their own grid within a pipeline stage: etp fastest, then ep, then expert data parallel.
    rest = rank % max(1, own.world // own.pp_size)
    for axis in ("etp", "ep", "edp"):
        rest, position[axis] = divmod(rest, own.size(axis))
    return replace(own, rank=rank, **position)


def all_ranks(own: Coordinates) -> list[Coordinates] | None:
    """The coordinates of every rank, or None if this rank is not where the default placement puts it."""
    if expected(own, own.rank) != own:
        return None
    return [expected(own, rank) for rank in range(own.world)]
