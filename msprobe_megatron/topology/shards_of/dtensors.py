"""Parameters sharded by torch itself (FSDP2, `DTensor`): the local part, and its position in the whole."""

from __future__ import annotations

from typing import Any

import torch

from msprobe_megatron.topology.shards import Cut, Dim, ShardSpec

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part on this rank of a distributed tensor, without communication; any other tensor as it is."""
    if tensor.__class__ in _PLAIN:
        return tensor
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor


def distributed_spec(tensor: torch.Tensor) -> ShardSpec | None:
    """Spec of the local part; None for a tensor that is not distributed.

    The mesh of a plain torch job is taken as its data-parallel world; meshes of several dimensions are not supported.
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
