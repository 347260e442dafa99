"""The parameters that an optimizer updates: Megatron's chained and distributed optimizers, and any optimizer of torch.

Optimizers are recognised by their attributes, not by class, because forks and releases rename classes. Nothing here
communicates or modifies state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from msprobe_megatron.topology.shards_of.dtensors import local_part


class Owned(NamedTuple):
    """A parameter that an optimizer of this rank updates.

    ``main`` is the tensor that the optimizer updates: the parameter, its float32 copy, or this rank's shard of it.
    ``part`` is the range [start, stop) of the flattened parameter that the shard covers; None for all of it.
    """

    parameter: nn.Parameter
    main: torch.Tensor
    optimizer: Any
    part: tuple[int, int] | None

    @property
    def separate(self) -> bool:
        """Whether the optimizer updates a separate copy."""
        if self.main is self.parameter:
            return False
        return _memory(self.main) != _memory(self.parameter)

    def gradient(self) -> torch.Tensor | None:
        """The gradient that the optimizer uses; Megatron's precision-aware optimizer keeps it in another attribute."""
        found = getattr(self.main, "decoupled_grad", None)
        return found if isinstance(found, torch.Tensor) else self.main.grad

    def state(self) -> dict[str, Any]:
        """The optimizer's state dictionary of the parameter; empty before the first step."""
        # Not by `[]`: the state is a defaultdict, which would create an entry.
        found: dict[str, Any] | None = getattr(self.optimizer, "state", {}).get(self.main)
        return {} if found is None else found

    def states(self) -> dict[str, torch.Tensor]:
        """The states with one value per element of the parameter, by name: ``exp_avg``, ``momentum_buffer``, …"""
        found, numel = self.state(), self.main.numel()
        return {
            str(name): value
            for name, value in found.items()
            if isinstance(value, torch.Tensor) and value.numel() == numel and (value.dim() or not self.main.dim())
        }


def _memory(tensor: torch.Tensor) -> int:
    return int(local_part(tensor).untyped_storage().data_ptr())


def leaves(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a (nested) chain, or the given one if it is not a chain."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        if optimizer is not None:
            yield optimizer
        return
    for one in chained:
        yield from leaves(one)


def inner(leaf: Any) -> Any:
    """The torch optimizer inside Megatron's, or the optimizer itself; None for one that has no parameters."""
    return leaf if isinstance(leaf, torch.optim.Optimizer) else getattr(leaf, "optimizer", leaf)


def owned(optimizer: Any) -> list[Owned]:
    """All parameters that the optimizers of this rank update, in the order of their groups."""
    return [entry for leaf in leaves(optimizer) for entry in _of(leaf)]


def _of(leaf: Any) -> Iterator[Owned]:
    base = inner(leaf)
    if base is None:
        return
    if hasattr(leaf, "model_float16_groups") and hasattr(leaf, "shard_fp32_groups"):
        yield from _sharded(leaf, base)
    elif hasattr(leaf, "float16_groups") and hasattr(leaf, "fp32_from_float16_groups"):
        for models, mains in zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True):
            for model, main in zip(models, mains, strict=True):
                yield Owned(model, main, base, None)
        for models in leaf.fp32_from_fp32_groups:
            for model in models:
                yield Owned(model, model, base, None)
    else:
        for group in getattr(base, "param_groups", ()):
            for parameter in group["params"]:
                yield Owned(parameter, parameter, base, None)


def _sharded(leaf: Any, base: Any) -> Iterator[Owned]:
    """Entries of the distributed optimizer; its range map gives this rank's part of each parameter."""
    held = {id(parameter) for group in base.param_groups for parameter in group["params"]}
    for models, mains, shards in (
        (leaf.model_float16_groups, leaf.shard_fp32_from_float16_groups, leaf.shard_float16_groups),
        (leaf.model_fp32_groups, leaf.shard_fp32_groups, leaf.shard_fp32_groups),
    ):
        for model_group, main_group, shard_group in zip(models, mains, shards, strict=True):
            for model, main, shard in zip(model_group, main_group, shard_group, strict=True):
                part = leaf._get_model_param_range_map(model)["param"]
                # The precision-aware optimizer keeps the float32 copy internally and is given the model's own shard.
                works_on = main if main is not None and id(main) in held else shard
                yield Owned(model, works_on, base, (int(part.start), int(part.end)))
