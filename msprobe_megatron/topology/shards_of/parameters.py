"""Shard specs of parameters, from the attributes that Megatron's layers set on them."""

from __future__ import annotations

from msprobe_megatron.topology import legacy_modules
from msprobe_megatron.topology.dtensors import distributed_spec
from msprobe_megatron.topology.names import NamedParameter
from msprobe_megatron.topology.shards import Cut, Dim, ShardSpec

# Experts of these classes keep all local experts in one tensor; their place in the whole is not a cut of a dimension.
_GROUPED = (
    "GroupedMLP",
    "TEGroupedMLP",
    "TEGroupedLinear",
    "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear",
)


def parameter_spec(entry: NamedParameter) -> ShardSpec:
    """How this rank's part of a parameter lies in the whole one.

    Example: the fc1 weight of a SwiGLU MLP gives ``d0[tp:gated] d1``.
    """
    parameter, module = entry.parameter, entry.owner.module
    kinds = {cls.__name__ for cls in type(module).__mro__}
    if kinds & set(_GROUPED):
        return ShardSpec.unmergeable("experts grouped in one tensor")
    distributed = distributed_spec(parameter)
    if distributed is not None:
        return distributed
    names = [f"d{index}" for index in range(parameter.dim())]
    cut_dim = _partition_dim(entry)
    if cut_dim is None:
        return ShardSpec(tuple(Dim(name) for name in names))
    axis = "etp" if getattr(module, "is_expert", False) else "tp"
    order = "gated" if _is_gated(entry) and cut_dim == 0 else "contiguous"
    dims = tuple(Dim(n, (Cut(axis, order),) if i == cut_dim else ()) for i, n in enumerate(names))
    return ShardSpec(dims)


def _partition_dim(entry: NamedParameter) -> int | None:
    parameter = entry.parameter
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim = int(getattr(parameter, "partition_dim", -1))
    return dim if 0 <= dim < parameter.dim() else None


def _is_gated(entry: NamedParameter) -> bool:
    """Gate and up halves share one weight; Megatron's `partition_stride` does not say so in every release."""
    mlp = entry.owner.parent
    config = getattr(mlp, "config", None)
    return entry.owner.attribute in ("linear_fc1", legacy_modules.GATED) and bool(
        getattr(config, "gated_linear_unit", False)
    )
