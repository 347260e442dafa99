"""Parameters that torch itself has cut (FSDP2, `DTensor`): the part that lies here, and how it lies in the whole."""

from __future__ import annotations

from typing import Any

import torch

from msprobe_megatron.topology.shards import Cut, Dim, ShardSpec

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part on this rank of a distributed tensor, without communication; any other tensor as it is.

    Example: of a weight of 8 rows that FSDP2 has cut over 2 ranks, 4 rows.
    """
    if tensor.__class__ in _PLAIN:
        return tensor
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor


def distributed_spec(tensor: torch.Tensor) -> ShardSpec | None:
    """How the local part lies in the whole; None for a tensor that is not distributed.

    The mesh of a plain torch job is its data-parallel world; a mesh of several dimensions is not known well enough.
    """
    placements: Any = getattr(tensor, "placements", None)
    mesh: Any = getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None:
        return None
    names = [f"d{index}" for index in range(tensor.dim())]
    if len(placements) != 1:
        return ShardSpec.unmergeable(f"cut over a mesh of {len(placements)} dimensions")
    placement = placements[0]
    if placement.is_replicate():
        return ShardSpec(tuple(Dim(name) for name in names))
    if not placement.is_shard():
        return ShardSpec.unmergeable("partial sums over a mesh")
    if tensor.shape[placement.dim] % mesh.size():
        return ShardSpec.unmergeable("cut into uneven parts by FSDP")
    return ShardSpec(tuple(Dim(n, (Cut("dp"),) if i == placement.dim else ()) for i, n in enumerate(names)))
