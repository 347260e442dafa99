"""Faults of random numbers, data, experts and forward that were invented after the laws; see `unlisted`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tests.jobs.compare.faults import Chunks, around, named
from tests.jobs.laws.planting import rank_on, wrap

# Random numbers.


def same_dropout_every_time(chunks: Chunks, optimizer: Any) -> None:
    """Every microbatch draws the same masks."""
    state = torch.get_rng_state()

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        torch.set_rng_state(state)
        tracker = get_cuda_rng_tracker()
        kept.setdefault("states", tracker.get_states())
        tracker.set_states({name: value.clone() for name, value in kept["states"].items()})
        return original(*args, **kwargs)

    kept: dict[str, Any] = {}
    for chunk in chunks:
        around(chunk.module, forward)


def one_dropout_for_all_ranks() -> None:
    """Attention dropout draws the same numbers on all tensor-parallel ranks."""
    from megatron.core.tensor_parallel import random

    def seed(original: Any, self: Any, name: str, value: int) -> None:
        original(self, name, 4242 if name == "model-parallel-rng" else value)

    wrap(random.CudaRNGStatesTracker, "add", seed)


def dropout_not_scaled() -> None:
    module = importlib.import_module("megatron.core.fusions.fused_bias_dropout")
    original = module._bias_dropout_add_func

    def changed(x_with_bias: Any, residual: torch.Tensor, prob: float, training: bool) -> torch.Tensor:
        x, bias = x_with_bias
        return original((x * (1 - prob), None if bias is None else bias * (1 - prob)), residual, prob, training)

    module._bias_dropout_add_func = changed
    from megatron.core.transformer import transformer_layer

    def get(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        return lambda x, residual, prob: changed(x, residual, prob, training)

    for owner in (module, transformer_layer):
        if hasattr(owner, "get_bias_dropout_add"):
            owner.get_bias_dropout_add = get
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    specs.get_bias_dropout_add = get


def recomputed_from_other_input() -> None:
    from megatron.core.tensor_parallel import random

    original = random.detach_variable

    def detached(inputs: Any) -> Any:
        found = original(inputs)
        first = found[0].detach() * 1.02
        first.requires_grad_(found[0].requires_grad)
        return (first, *found[1:])

    random.detach_variable = detached


# Data and loss.


def every_step_the_same() -> None:
    from msprobe_megatron.lab.demo.data import Batches

    original = Batches.sample_index
    Batches.sample_index = lambda self, iteration, microbatch, row: original(self, 0, microbatch, row)


def contiguous_context() -> None:
    """Context-parallel ranks read halves of the sequence, and attention expects zigzag parts."""
    from msprobe_megatron.lab.demo import data

    for name, spec in list(data._SEQUENCE.items()):
        if name != "attention_mask":
            data._SEQUENCE[name] = spec.replace(":zigzag", "")


def smoothed() -> None:
    module = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")
    original = module._VocabParallelCrossEntropy.apply

    class Smoothed(module._VocabParallelCrossEntropy):  # type: ignore[misc, name-defined]
        pass

    Smoothed.__name__ = "_VocabParallelCrossEntropy"
    assert original is not None
    module.vocab_parallel_cross_entropy = lambda logits, target, smoothing=0.0, group=None: (
        module._VocabParallelCrossEntropy.apply(logits, target, 0.1, group)
        if group is not None
        else module._VocabParallelCrossEntropy.apply(logits, target, 0.1)
    )
    loss = importlib.import_module("megatron.core.tensor_parallel")
    loss.vocab_parallel_cross_entropy = module.vocab_parallel_cross_entropy


def one_head_unmasked(chunks: Chunks, optimizer: Any) -> None:
    module = named(chunks, "decoder.layers.1.self_attention.core_attention.scale_mask_softmax")

    def forward(original: Any, scores: torch.Tensor, mask: torch.Tensor, *args: Any) -> torch.Tensor:
        head = torch.softmax(scores[:, :1].float(), -1)  # before: the mask is filled in in place
        found = original(scores, mask, *args)
        head = head.to(found.dtype)
        return torch.cat([head, found[:, 1:]], 1)

    if module is not None:
        around(module, forward)


# Experts.


def home_in_other_order() -> None:
    """What experts put out comes home to the neighbour of the token it belongs to."""
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def combined(original: Any, self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = original(self, *args, **kwargs)
        return output.roll(1, 0)

    wrap(dispatcher.MoEAlltoAllTokenDispatcher, "combine_postprocess", combined)


def weighed_twice(chunks: Chunks, optimizer: Any) -> None:
    module = named(chunks, "decoder.layers.1.mlp.experts")
    if module is not None:

        def forward(original: Any, hidden: Any, counts: Any, probs: torch.Tensor, *args: Any) -> Any:
            output, bias = original(hidden, counts, probs, *args)
            return output * probs.unsqueeze(-1), bias

        around(module, forward)


def aux_scale(chunks: Chunks, optimizer: Any) -> None:
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    original = utils.MoEAuxLossAutoScaler.set_loss_scale
    utils.MoEAuxLossAutoScaler.set_loss_scale = staticmethod(lambda scale: original(scale * 4))


def tokens_of_wrong_expert() -> None:
    """Expert 0 and 1 of a rank exchange their tokens."""
    experts = importlib.import_module("megatron.core.transformer.moe.experts")

    def forward(original: Any, self: Any, hidden: torch.Tensor, counts: torch.Tensor, *args: Any) -> Any:
        first, second = int(counts[0]), int(counts[1])
        order = torch.cat(
            [torch.arange(first, first + second), torch.arange(first), torch.arange(first + second, len(hidden))]
        )
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        changed = counts.clone()
        changed[0], changed[1] = second, first
        output, bias = original(self, hidden[order], changed, *(a[order] for a in args))
        return output[back], bias

    wrap(experts.SequentialMLP, "forward", forward)


# Forward.


def other_groups() -> None:
    """Heads of a group are laid out in turn instead of side by side."""

    def repeat(self: torch.Tensor, times: int, dim: int) -> torch.Tensor:
        sizes = [1] * self.dim()
        sizes[dim] = times
        return self.repeat(*sizes)

    core = importlib.import_module("megatron.core.transformer.dot_product_attention")

    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = torch.Tensor.repeat_interleave
        torch.Tensor.repeat_interleave = repeat  # type: ignore[method-assign, assignment]
        try:
            return original(self, *args, **kwargs)
        finally:
            torch.Tensor.repeat_interleave = kept  # type: ignore[method-assign]

    wrap(core.DotProductAttention, "forward", forward)


def last_norm_left_out(chunks: Chunks, optimizer: Any) -> None:
    module = named(chunks, "decoder.final_layernorm")
    if module is not None:
        around(module, lambda original, x: x * module.weight)


def relu_for_silu(chunks: Chunks, optimizer: Any) -> None:
    module = named(chunks, "decoder.layers.2.mlp")
    if module is not None:
        module.activation_func = torch.nn.functional.relu
        module.config.bias_activation_fusion = False


def tied_weights_drift(chunks: Chunks, optimizer: Any) -> None:
    """The last stage began with another copy of the embedding."""
    if rank_on("pp") == 1:
        for name, parameter in chunks[-1].named_parameters():
            if "output_layer.weight" in name:
                parameter.data.add_(1e-3)


def queries_and_keys_exchanged(chunks: Chunks, optimizer: Any) -> None:
    module = named(chunks, "decoder.layers.1.self_attention.core_attention")

    def forward(original: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return original(key, query, value, *args, **kwargs)

    if module is not None:
        around(module, forward)


def dropped_bias(chunks: Chunks, optimizer: Any) -> None:
    module = named(chunks, "decoder.layers.1.self_attention.linear_proj")
    if module is not None:
        module.bias.data.normal_()
        around(module, lambda original, *a, **k: (original(*a, **k)[0], torch.zeros_like(module.bias)))
