"""Canonical names: the module path that the same weight has in a run with TP=PP=VPP=EP=1.

Wrappers are stripped, layer numbers are global (Megatron numbers its layers itself, also in uneven and virtual stages),
local experts get their global numbers, and the copy of a tied embedding on the last stage has the embedding's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

ROOT = "model"
_TIED = "embedding.word_embeddings.weight"


@dataclass(frozen=True, eq=False)
class NamedModule:
    """A module of a chunk with its canonical name and the module that holds it."""

    name: str
    module: nn.Module
    parent: nn.Module | None

    @property
    def attribute(self) -> str:
        """Name under which the parent holds it (last part of the path)."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, eq=False)
class NamedParameter:
    """A parameter with its canonical name, the module that owns it, and the unwrapped model it belongs to."""

    name: str
    parameter: nn.Parameter
    owner: NamedModule
    model: nn.Module | None = None


def unwrap(chunk: nn.Module) -> nn.Module:
    """The model inside DDP, Float16Module, FSDP and the like.

    Example::

        >>> unwrap(torch.nn.Sequential())
        Sequential()
    """
    inner = getattr(chunk, "module", None) if type(chunk).__name__ in _WRAPPERS else None
    return unwrap(inner) if isinstance(inner, nn.Module) else chunk


# Wrappers that hold the model as `.module`. By name, because several packages have classes of these names, and a model
# may have a child called "module" itself.
_WRAPPERS = frozenset(
    {
        "DistributedDataParallel",
        "Float16Module",
        "FullyShardedDataParallel",
        "TorchFullyShardedDataParallel",
        "DataParallel",
        "FSDP",
        "MegatronFSDP",
    }
)


def modules(chunk: nn.Module) -> Iterator[NamedModule]:
    """All modules of a chunk in the order of definition, without duplicates, the model itself first (as ``model``)."""
    root = unwrap(chunk)
    seen: set[int] = {id(root)}
    yield NamedModule(ROOT, root, None)
    yield from _walk(root, "", seen)


def _walk(parent: nn.Module, prefix: str, seen: set[int]) -> Iterator[NamedModule]:
    for attribute, child in parent.named_children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        if isinstance(child, nn.ModuleList):
            for index, item in enumerate(child):
                if id(item) in seen:
                    continue
                seen.add(id(item))
                name = f"{prefix}{attribute}.{_global_index(parent, attribute, index, item)}"
                yield NamedModule(name, item, parent)
                yield from _walk(item, f"{name}.", seen)
        else:
            name = f"{prefix}{attribute}"
            yield NamedModule(name, child, parent)
            yield from _walk(child, f"{name}.", seen)


def _global_index(parent: nn.Module, attribute: str, index: int, item: nn.Module) -> int:
    number = getattr(item, "layer_number", None)
    if attribute == "layers" and isinstance(number, int):
        return number - 1
    if attribute == "local_experts":
        return expert_offset(parent) + index
    return index


def expert_offset(experts: nn.Module) -> int:
    """Global number of the first local expert, from the experts' own expert-parallel group."""
    group = getattr(experts, "ep_group", None)
    local = getattr(experts, "num_local_experts", None)
    if local is None:
        return 0
    if group is None:
        from msprobe_megatron.topology.coordinates import current
        from msprobe_megatron.topology.expert_grid import first_expert

        return first_expert(experts, current())
    return int(torch.distributed.get_rank(group)) * int(local)


def parameters(chunk: nn.Module) -> Iterator[NamedParameter]:
    """All parameters of a chunk under canonical names, without duplicates.

    Example::

        >>> [p.name for p in parameters(torch.nn.Linear(2, 2))]
        ['weight', 'bias']
    """
    root = unwrap(chunk)
    seen: set[int] = set()
    for entry in modules(chunk):
        prefix = "" if entry.parent is None else f"{entry.name}."
        for attribute, parameter in entry.module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}{attribute}"
            if name == "output_layer.weight" and getattr(root, "share_embeddings_and_output_weights", False):
                name = _TIED
            elif name == "word_embeddings.weight" and hasattr(root, "language_model"):
                # The legacy model keeps the last stage's copy beside the language model.
                name = f"language_model.{_TIED}"
            yield NamedParameter(name, parameter, entry, root)
