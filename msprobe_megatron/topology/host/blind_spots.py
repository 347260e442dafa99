"""What a job's own options hide from the kit: fused operators, replayed graphs, schedules that bypass the layers.

Read once at attach from the host's arguments and the model's config. Each finding is written to run.json and printed,
because a row that cannot exist must not be mistaken for one that was not requested.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn


class BlindSpot(NamedTuple):
    """An option, its relevant values (any true one if empty), and what cannot be observed because of it."""

    option: str
    values: tuple[Any, ...]
    unseen: str


_FUSED = "the tensor-parallel exchange happens inside a fused operator; the layers' inputs and outputs are recorded"
_PIECES = "layers run in pieces that bypass their forward; rows of the modules inside a layer are missing"
_AWAY = "offloading to host memory is not observed; values are recorded before they are offloaded"
_GRAPH = "a captured graph is replayed without calling the modules; steps after the capture have no module rows"
_ITERATION = "whole iterations are replayed as one graph; after its capture nothing inside a step is seen"

# Names as argparse stores them; MindSpeed, MindSpeed-LLM and ModelLink first, then Megatron's own.
BLIND_SPOTS = (
    BlindSpot("use_mc2", (), _FUSED),
    BlindSpot("use_ascend_mc2", (), _FUSED),
    BlindSpot("use_ascend_coc", (), _FUSED),
    BlindSpot("moe_bmm_mc2", (), "the experts' exchange happens inside a fused operator"),
    BlindSpot("moe_alltoall_mc2", (), "the experts' exchange happens inside a fused operator"),
    BlindSpot("moe_fb_overlap", (), _PIECES),
    BlindSpot("moe_alltoall_overlap_comm", (), "experts run inside one autograd function; their modules have no rows"),
    BlindSpot("moe_allgather_overlap_comm", (), "experts run inside one autograd function; their modules have no rows"),
    BlindSpot("use_pipe_experts", (), "experts run in slices; a module's rows are numbered call0, call1, …"),
    BlindSpot("schedules_method", ("dualpipev",), "DualPipeV is a schedule of its own: its steps may not be seen"),
    BlindSpot("enable_seq1f1b", (), "a microbatch is cut along the sequence; its rows are numbered call0, call1, …"),
    BlindSpot("use_nanopipe", (), "weight gradients are computed apart from the backward; they appear when reduced"),
    BlindSpot("recompute_in_advance", (), "forwards repeated ahead of backward carry the running microbatch's number"),
    BlindSpot("recompute_in_bubble", (), "forwards repeated in a bubble carry the running microbatch's number"),
    BlindSpot("swap_attention", (), _AWAY),
    BlindSpot("smart_swap", (), _AWAY),
    BlindSpot("adaptive_recompute_device_swap", (), _AWAY),
    BlindSpot("mla_swap_core_attn_out", (), _AWAY),
    BlindSpot("moe_unperm2_mem_optim_swap", (), _AWAY),
    BlindSpot("use_nanopipe_swap", (), _AWAY),
    BlindSpot("swap_optimizer", (), "optimizer state that is on the host during the step is not recorded"),
    BlindSpot("reuse_fp32_param", (), "there is no separate fp32 copy of the weights to record"),
    BlindSpot("tp_2d", (), "weights are cut over two tensor-parallel axes; their rows are not merged"),
    BlindSpot(
        "context_parallel_algo",
        ("hybrid_cp_algo", "adaptive_cp_algo", "hybrid_adaptive_cp_algo", "kvallgather_cp_algo"),
        "the order of the sequence over context-parallel ranks is not known; sums merge, digests do not",
    ),
    BlindSpot("overlap_moe_expert_parallel_comm", (), _PIECES),
    BlindSpot("enable_cuda_graph", (), _GRAPH),
    BlindSpot("external_cuda_graph", (), _GRAPH),
    BlindSpot("cuda_graph_impl", ("local", "transformer_engine"), _GRAPH),
    BlindSpot("cuda_graph_impl", ("full_iteration",), _ITERATION),
    BlindSpot("cuda_graph_scope", ("full_iteration",), _ITERATION),
)


def unseen(*sources: Any) -> list[str]:
    """One message for each option of `sources` (namespaces or configs) that hides something.

    Example::

        >>> from argparse import Namespace
        >>> unseen(Namespace(use_mc2=True))[0].split(":")[0]
        'use_mc2'
    """
    found: dict[str, str] = {}
    for spot in BLIND_SPOTS:
        for source in sources:
            given = getattr(source, spot.option, None)
            # Megatron's newer options are lists of enumerated words.
            words = [getattr(one, "name", one) for one in (given if isinstance(given, list | tuple) else [given])]
            value = next((word for word in words if word in spot.values), None) if spot.values else given
            if value:
                shown = f"={value}" if spot.values else ""
                found.setdefault(spot.option, f"{spot.option}{shown}: {spot.unseen}")
    return list(found.values())


# Releases of megatron-core of which docs/hosts/table.md has rows.
TRIED = ((0, 6), (0, 20))


def untried(release: str | None) -> list[str]:
    """A message if the kit has not been tested with this release of megatron-core: renamed functions would have no
    rows.

    Example::

        >>> untried("0.16.1"), untried("9.9.9")[0].partition(":")[0]
        ([], 'megatron-core 9.9.9')
    """
    numbers = re.match(r"(\d+)\.(\d+)", release or "")
    if numbers is None:
        return []
    oldest, newest = TRIED
    if oldest <= (int(numbers[1]), int(numbers[2])) <= newest:
        return []
    tried = " to ".join(".".join(map(str, numbers)) for numbers in TRIED)
    return [
        f"megatron-core {release}: this kit was tried with {tried}; what this release calls otherwise has no rows"
        " (msprobe-megatron patches lists what binds)"
    ]


def compiled(chunks: Sequence[nn.Module]) -> list[str]:
    """A message if parts of the model are compiled by torch: no module and no API call is visible inside them."""
    found = [
        name or "the model itself"
        for chunk in chunks
        for name, module in chunk.named_modules()
        if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
    ]
    if not found:
        return []
    return [
        f"torch.compile: {len(found)} compiled modules, the first is {found[0]}: modules and API calls inside them have"
        " no rows of their own; their parameters, gradients, and the modules around them have"
    ]


def reducers(chunks: Sequence[nn.Module]) -> list[str]:
    """A message if torch's own DistributedDataParallel is used: its reducer communicates from C++."""
    found = [
        name or "the model itself"
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, nn.parallel.DistributedDataParallel)
    ]
    if not found:
        return []
    return [
        f"torch DistributedDataParallel ({found[0]}): its all-reduces of gradients and broadcasts of buffers are made"
        " in C++ and have no comm rows; the reduced gradients have rows"
    ]


def context_parallel_order(arguments: Any) -> str:
    """Order in which the sequence is sharded over context-parallel ranks: zig-zag, unless MindSpeed sets another.

    Example::

        >>> from argparse import Namespace
        >>> context_parallel_order(Namespace(context_parallel_algo="ulysses_cp_algo"))
        'contiguous'
    """
    algorithm = getattr(arguments, "context_parallel_algo", None)
    if algorithm is None:
        return "zigzag"
    mask = getattr(arguments, "attention_mask_type", "causal")
    if getattr(arguments, "reset_attention_mask", False) and mask == "causal":
        # Sharded per document, so the positions depend on the batch.
        return "unordered"
    if algorithm == "megatron_cp_algo":
        return "contiguous" if mask == "general" else "zigzag"
    return "contiguous" if algorithm == "ulysses_cp_algo" else "unordered"
