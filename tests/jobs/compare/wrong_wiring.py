"""Faults in what a module returns, keeps or reads: wrong biases, residuals, scales and halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.jobs.compare.faults import Chunks, Fault, around, named


def _bias(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Fault:
    """A module returns another bias beside its output."""

    def ready(chunks: Chunks) -> None:
        def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
            output, bias = original(*args, **kwargs)
            return output, change(bias)

        module = named(chunks, name)
        if module is not None:
            around(module, forward)

    return Fault(ready=ready)


def _of_rank_0(bias: torch.Tensor) -> torch.Tensor:
    """The first rank's part of a bias, on all ranks."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(bias) for _ in range(group.size())]
    torch.distributed.all_gather(parts, bias.detach().clone(), group=group)
    return bias - bias.detach() + parts[0] + 0.01


def _summand_lost(chunks: Chunks) -> None:
    """With expert tensor parallelism, the second rank of an expert adds nothing to the output."""
    from megatron.core import parallel_state

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        output, bias = original(*args, **kwargs)
        return output * (parallel_state.get_expert_tensor_parallel_rank() == 0), bias

    around(named(chunks, "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2"), forward)


WIRING = {
    "expert_summand_lost": Fault(ready=_summand_lost),
    "row_bias_of_every_rank": _bias("decoder.layers.1.self_attention.linear_proj", lambda bias: 2 * (bias + 0.01)),
    "row_bias_lost": _bias("decoder.layers.1.mlp.linear_fc2", lambda bias: None),
    "column_bias_of_rank_0": _bias("decoder.layers.2.mlp.linear_fc1", _of_rank_0),
}
