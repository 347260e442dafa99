"""Replica groups: for each process group of this rank, the parameters that all its members must hold identically.

Weights are replicated over data and context parallel ranks, those of experts over expert data parallel ranks;
parameters that tensor parallelism does not shard (norms, routers, biases) over its ranks; a tied embedding over the
first and last stage. Derived from Megatron's groups and the attributes of the parameters; nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import distributed, nn

from msprobe_megatron.topology import names
from msprobe_megatron.topology.coordinates import parallel_state
from msprobe_megatron.topology.groups import group_facts
from msprobe_megatron.topology.shards_of.parameters import parameter_spec


class Shared(NamedTuple):
    """A parameter of a chunk that other ranks hold as well."""

    name: str
    chunk: nn.Module
    parameter: nn.Parameter


class ReplicaGroup(NamedTuple):
    """Ranks that must hold the same ``shared`` parameters; ``label`` is dp-cp, edp, tp, etp, embedding or world."""

    label: str
    ranks: tuple[int, ...]
    shared: tuple[Shared, ...]


def replica_groups(chunks: Sequence[nn.Module]) -> list[ReplicaGroup]:
    """The groups of this rank with more than one member, with the parameters that their members share."""
    entries = [(entry, chunk) for chunk in chunks for entry in names.parameters(chunk)]
    everything = [(entry, Shared(entry.name, chunk, entry.parameter)) for entry, chunk in entries]
    known = [(entry, shared, spec) for entry, shared in everything if (spec := parameter_spec(entry)).unknown is None]
    if parallel_state() is None:
        # A wrapper that shards parameters (FSDP) makes distributed tensors of them; all others are whole on every rank.
        whole = [shared for _, shared, spec in known if not spec.cut_axes()]
        return _groups([("world", _world(), whole)])
    dense = [shared for _, shared in everything if not _is_expert(shared.parameter)]
    experts = [shared for _, shared in everything if _is_expert(shared.parameter)]
    uncut = [(entry, shared) for entry, shared, spec in known if not {"tp", "etp"} & set(spec.cut_axes())]
    tied = [shared for entry, shared in everything if _is_tied(entry)]
    return _groups(
        [
            ("dp-cp", _group("get_data_parallel_group", with_context_parallel=True), dense),
            ("edp", _expert_data_group(), experts),
            ("tp", _group("get_tensor_model_parallel_group"), [s for _, s in uncut if not _is_expert(s.parameter)]),
            ("etp", _group("get_expert_tensor_parallel_group"), [s for _, s in uncut if _is_expert(s.parameter)]),
            ("embedding", _group("get_embedding_group"), tied),
        ]
    )


def tensor_parallel_ranks() -> tuple[int, ...]:
    """The ranks of this rank's tensor parallel group; empty without one."""
    return _ranks(_group("get_tensor_model_parallel_group"))


def _groups(found: list[tuple[str, Any, list[Shared]]]) -> list[ReplicaGroup]:
    groups = [ReplicaGroup(label, _ranks(group), tuple(shared)) for label, group, shared in found]
    own = distributed.get_rank() if _world() is not None else -1
    return [group for group in groups if len(group.ranks) > 1 and own in group.ranks and group.shared]


def _ranks(group: Any) -> tuple[int, ...]:
    return group_facts(group).ranks if group is not None else ()


def _world() -> Any:
    return distributed.group.WORLD if distributed.is_available() and distributed.is_initialized() else None


def _group(getter: str, **arguments: Any) -> Any:
    """A group of Megatron, or None if this release, job or rank does not have it."""
    try:
        group = getattr(parallel_state(), getter)(**arguments)
    except (AttributeError, AssertionError, TypeError):
        return None
    # Some getters return a list of groups.
    return group if not isinstance(group, list) else next((one for one in group if one is not None), None)


def _expert_data_group() -> Any:
    for getter in ("get_expert_data_parallel_group", "get_data_modulo_expert_parallel_group"):
        group = _group(getter)
        if group is not None:
            return group
    return None


def _is_expert(parameter: nn.Parameter) -> bool:
    """Megatron marks parameters that are not reduced over all data parallel ranks."""
    return not getattr(parameter, "allreduce", True)


def _is_tied(entry: names.NamedParameter) -> bool:
    return entry.name.endswith("word_embeddings.weight") and bool(
        getattr(entry.parameter, "shared_embedding", False) or getattr(entry.parameter, "shared", False)
    )
