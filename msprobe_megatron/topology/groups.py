"""Labels and members of process groups, from Megatron's own groups; nothing here communicates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import distributed

from msprobe_megatron.topology.coordinates import parallel_state

# Label -> getter of megatron.core.parallel_state and its arguments; the first one that returns the group labels it.
_GETTERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("tp", "get_tensor_model_parallel_group", {}),
    ("pp", "get_pipeline_model_parallel_group", {}),
    ("dp", "get_data_parallel_group", {}),
    ("dp-cp", "get_data_parallel_group", {"with_context_parallel": True}),
    ("cp", "get_context_parallel_group", {}),
    ("ep", "get_expert_model_parallel_group", {}),
    ("etp", "get_expert_tensor_parallel_group", {}),
    ("edp", "get_expert_data_parallel_group", {}),
    ("etp-ep", "get_expert_tensor_and_model_parallel_group", {}),
    ("embedding", "get_embedding_group", {}),
    ("mp", "get_model_parallel_group", {}),
    ("tp-cp", "get_tensor_and_context_parallel_group", {}),
    ("tp-dp", "get_tensor_and_data_parallel_group", {}),
)


class GroupFacts(NamedTuple):
    """A process group: its label (an axis of Megatron where it is one) and the global ranks in it, in order."""

    label: str
    ranks: tuple[int, ...]

    def global_rank(self, group_rank: int) -> int:
        """The global rank of a rank of the group."""
        return self.ranks[group_rank] if 0 <= group_rank < len(self.ranks) else group_rank


def group_facts(group: Any) -> GroupFacts:
    """Label and members of a process group."""
    try:
        ranks = tuple(int(rank) for rank in distributed.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):  # not registered with torch.distributed
        ranks = ()
    for label, known in _known():
        if known is group:
            return GroupFacts(label, ranks)
    described = str(getattr(group, "group_desc", "") or "").lower().removesuffix("_group")
    if described in ("", "undefined"):
        described = f"ranks{list(ranks)}".replace(" ", "")
    return GroupFacts(described, ranks)


def _known() -> Iterator[tuple[str, Any]]:
    state = parallel_state()
    for label, getter, arguments in _GETTERS if state is not None else ():
        try:
            yield label, getattr(state, getter)(**arguments)
        except (AttributeError, AssertionError, TypeError):  # an axis that this release or this job does not have
            continue
    yield "world", distributed.group.WORLD
