"""Shard specs of parameters: those that Megatron declares, else from the attributes that its layers set on them."""

from __future__ import annotations

from msprobe_megatron.topology.names import NamedParameter
from msprobe_megatron.topology.shards import Cut, Dim, ShardSpec
from msprobe_megatron.topology.shards_of import legacy
from msprobe_megatron.topology.shards_of.declared import declared_spec
from msprobe_megatron.topology.shards_of.dtensors import distributed_spec

# These classes keep all local experts in one tensor, whose position in the whole is not a shard of a dimension.
_GROUPED = (
    "GroupedMLP",
    "TEGroupedMLP",
    "TEGroupedLinear",
    "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear",
)


def parameter_spec(entry: NamedParameter) -> ShardSpec:
    """Spec of this rank's part of a parameter."""
    parameter, module = entry.parameter, entry.owner.module
    kinds = {cls.__name__ for cls in type(module).__mro__}
    if kinds & set(_GROUPED):
        return ShardSpec.unmergeable("experts grouped in one tensor")
    distributed = distributed_spec(parameter)
    if distributed is not None:
        return distributed
    declared = declared_spec(parameter, entry.model)
    if declared is not None:
        return declared
    names = [f"d{index}" for index in range(parameter.dim())]
    cut_dim = _partition_dim(entry)
    if cut_dim is None:
        return ShardSpec(tuple(Dim(name) for name in names))
    axis = "etp" if getattr(module, "is_expert", False) else "tp"
    cut = Cut(axis, "gated" if _is_gated(entry) and cut_dim == 0 else "contiguous")
    sizes = getattr(parameter, "partition_sizes", None)
    if isinstance(sizes, list | tuple) and len(sizes) > 1 and sum(sizes) == parameter.shape[cut_dim]:
        cut = Cut(axis, "packed", tuple(map(int, sizes)))
    return ShardSpec(tuple(Dim(n, (cut,) if i == cut_dim else ()) for i, n in enumerate(names)))


def _partition_dim(entry: NamedParameter) -> int | None:
    parameter = entry.parameter
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim = int(getattr(parameter, "partition_dim", -1))
    return dim if 0 <= dim < parameter.dim() else None


def _is_gated(entry: NamedParameter) -> bool:
    """Whether gate and up halves share one weight, which `partition_stride` does not show in every release."""
    mlp = entry.owner.parent
    config = getattr(mlp, "config", None)
    return entry.owner.attribute in ("linear_fc1", legacy.GATED) and bool(getattr(config, "gated_linear_unit", False))
