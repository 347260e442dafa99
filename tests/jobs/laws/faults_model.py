"""Faults of data, forward, experts and loss that one run alone shows."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from tests.jobs.compare.faults import Chunks, around, named
from tests.jobs.laws.planting import Fault, nothing, rank_on, wrap

_LAYER_2 = "decoder.layers.2"

# Data.


def _index(change: Callable[[Any, int, int, int], int]) -> Callable[[], None]:
    def before() -> None:
        from msprobe_megatron.lab.demo.data import Batches

        Batches.sample_index = lambda self, iteration, microbatch, row: change(self, iteration, microbatch, row)

    return before


def _same_samples(self: Any, iteration: int, microbatch: int, row: int) -> int:
    args = self.args
    return iteration * args.global_batch_size + microbatch * args.micro_batch_size + row


def _again(self: Any, iteration: int, microbatch: int, row: int) -> int:
    return iteration * self.args.global_batch_size + self.here.dp * self.args.micro_batch_size + row


def _batch(change: Callable[[Any, dict[str, torch.Tensor]], None]) -> Callable[[], None]:
    def before() -> None:
        from msprobe_megatron.lab.demo.data import Batches

        def microbatch(original: Any, self: Any, *args: Any) -> Any:
            batch = original(self, *args)
            change(self, batch)
            return batch

        wrap(Batches, "microbatch", microbatch)

    return before


def _unshifted(self: Any, batch: dict[str, torch.Tensor]) -> None:
    batch["labels"] = batch["tokens"].clone()


def _positions(self: Any, batch: dict[str, torch.Tensor]) -> None:
    batch["position_ids"] = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"]).contiguous()


def _mask_off_by_one(self: Any, batch: dict[str, torch.Tensor]) -> None:
    length = batch["attention_mask"].shape[-1]
    batch["attention_mask"] = torch.ones(length, length, dtype=torch.bool).triu(2)[None, None]


# Forward.


def _no_mask(chunks: Chunks, optimizer: Any) -> None:
    """Layer 2 attends to everything."""

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(torch.zeros_like(a) if a is not None and a.dtype is torch.bool else a for a in args)
        return original(*args, **kwargs)

    module = named(chunks, "decoder.layers.2.self_attention.core_attention.scale_mask_softmax")
    if module is not None:
        around(module, forward)


def _scaled(name: str, factor: float) -> Callable[[Chunks, Any], None]:
    def ready(chunks: Chunks, optimizer: Any) -> None:
        module = named(chunks, name)

        def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

        if module is not None:
            around(module, forward)

    return ready


def _softmax_scale(chunks: Chunks, optimizer: Any) -> None:
    for layer in range(4):
        module = named(chunks, f"decoder.layers.{layer}.self_attention.core_attention")
        if module is not None:
            module.softmax_scale = 1.0


def _epsilon(chunks: Chunks, optimizer: Any) -> None:
    module = named(chunks, "decoder.layers.1.pre_mlp_layernorm")
    if module is not None:
        module.eps = 0.1


def _norm_left_out(chunks: Chunks, optimizer: Any) -> None:
    module = named(chunks, "decoder.layers.1.pre_mlp_layernorm")
    if module is not None:
        around(module, lambda original, x: x * 100)


def _no_residual(chunks: Chunks, optimizer: Any) -> None:
    """Layer 1 forgets what came in when it adds its MLP."""
    module = named(chunks, "decoder.layers.1")
    if module is not None:
        original = module._forward_post_mlp
        module._forward_post_mlp = lambda output, residual: original(output, residual * 0.5)


def _rng_not_restored() -> None:
    from megatron.core.tensor_parallel import random

    random._set_all_rng_states = nothing


def _stale_receive() -> None:
    """A stage gets the tensor of the microbatch before, once."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    last: list[torch.Tensor] = []

    def received(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        got = original(self, *args, **kwargs)
        tensor = got[0] if isinstance(got, list) else got
        if tensor is not None:
            last.append(tensor.detach().clone())
            if len(last) == 2:
                tensor.data.copy_(last[0])
        return got

    wrap(P2PCommunicator, "recv_forward", received)
    wrap(P2PCommunicator, "send_backward_recv_forward", received)


def _changed_on_the_way() -> None:
    """What a stage sends is not what arrives."""
    kept: list[Any] = []

    def send(original: Any, self: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        kept.append([tensor * 1.01 for tensor in tensors])
        return original(self, kept[-1], *args)

    wrap(torch.distributed.ProcessGroup, "send", send)


def _rotary_base(chunks: Chunks, optimizer: Any) -> None:
    module = named(chunks, "rotary_pos_emb")
    width = module.inv_freq.numel() * 2
    module.inv_freq.copy_(1.0 / 500.0 ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def _norm_bf16(chunks: Chunks, optimizer: Any) -> None:
    """One attention of a model in float32 puts out bf16."""
    module = named(chunks, "decoder.layers.2.self_attention.core_attention")
    if module is not None:
        around(module, lambda original, *a, **k: original(*a, **k).bfloat16().float())


# Experts.


def _routing(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., None]:
    def ready(chunks: Chunks, optimizer: Any) -> None:
        module = named(chunks, "decoder.layers.1.mlp.router")
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return change(*original(*args, **kwargs))

        module.forward = forward

    return ready


def _one_expert_less(probs: torch.Tensor, routed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best = probs.argmax(dim=1, keepdim=True)
    only = torch.zeros_like(routed).scatter_(1, best, True)
    return probs * only, only


def _lost_tokens(chunks: Chunks, optimizer: Any) -> None:
    """Experts get the first token in place of the last."""
    module = named(chunks, "decoder.layers.1.mlp.experts")

    def forward(original: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(torch.cat([hidden[:1], hidden[:-1]]), *args, **kwargs)

    # What goes wrong lies before the experts: their own input shows it.
    original = module.__class__.__call__

    class Changed(module.__class__):  # type: ignore[name-defined, misc]
        def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(self, torch.cat([hidden[:1], hidden[:-1]]), *args, **kwargs)

    module.__class__ = Changed


# Loss.


def _token_loss(change: Callable[..., Any]) -> Callable[[], None]:
    def before() -> None:
        from msprobe_megatron.lab.demo import train as demo

        original = demo.token_loss
        demo.token_loss = lambda losses: change(*original(losses))

    return before


def _wrong_label() -> None:
    """The gradient of the loss forgets the label of every other token."""
    module = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")

    def gradients(original: Any, *args: Any, **kwargs: Any) -> Any:
        args = list(args)
        update = args[3].clone()
        update.view(-1)[::2] = 0
        args[3] = update
        return original(*args, **kwargs)

    found = module.VocabParallelCrossEntropy.calculate_gradients
    module.VocabParallelCrossEntropy.calculate_gradients = staticmethod(functools.partial(gradients, found))


def _layer_skipped(chunks: Chunks, optimizer: Any) -> None:
    """Layer 2 hands on what it is given."""
    module = named(chunks, "decoder.layers.2.mlp")
    if module is not None:
        around(module, lambda original, x, *a, **k: (x, original(x, *a, **k)[1]))


def _same(value: Any) -> Any:
    return value


def _between(
    name: str, after: Callable[[Any], Any] = _same, before: Callable[[Any], Any] = _same
) -> Callable[[Chunks, Any], None]:
    """Change what a module puts out, or is given first, outside of it: its own rows do not show it."""

    def ready(chunks: Chunks, optimizer: Any) -> None:
        module = named(chunks, name)
        kind = type(module)

        class Changed(kind):  # type: ignore[valid-type, misc]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return after(super().__call__(*(before(a) if i == 0 else a for i, a in enumerate(args)), **kwargs))

        Changed.__name__ = kind.__name__
        module.__class__ = Changed

    return ready


def _half_precision(chunks: Chunks, optimizer: Any) -> None:
    name = f"{_LAYER_2}.self_attention.core_attention"
    around(named(chunks, name), lambda original, *a, **k: original(*a, **k).bfloat16())
    _between(name, after=lambda output: output.float())(chunks, optimizer)


def _rounds_otherwise(chunks: Chunks, optimizer: Any) -> None:
    if rank_on("tp") == 1:
        module = named(chunks, "decoder.layers.1.pre_mlp_layernorm")
        around(module, lambda original, x: original(x) * (1 + 1e-6))


def _negative_loss() -> None:
    from megatron.core.models.gpt import GPTModel

    wrap(GPTModel, "compute_language_model_loss", lambda original, *a, **k: original(*a, **k) - 10)


def _masked(ignored: bool) -> Callable[[], None]:
    """The model is given a loss mask; the loss function knows it too, or does not."""

    def before() -> None:
        from msprobe_megatron.lab.demo import train as demo

        def forward_step(reader: Any, model: torch.nn.Module) -> Any:
            batch = next(reader)
            mask = torch.ones(batch["tokens"].shape)
            mask[:, 3:5] = 0
            places = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
            output = model(*places, labels=batch["labels"], loss_mask=mask)

            def loss(losses: torch.Tensor) -> Any:
                total, count = (losses * mask).sum(), mask.sum().int()
                return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

            return output, demo.token_loss if ignored else loss

        demo.forward_step = forward_step

    return before


def _label_counts_less() -> None:
    module = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")
    found = module.VocabParallelCrossEntropy.calculate_gradients

    def gradients(grad: Any, places: Any, labels: Any, update: torch.Tensor, *args: Any) -> Any:
        return found(grad, places, labels, update * 0.9, *args)

    module.VocabParallelCrossEntropy.calculate_gradients = staticmethod(gradients)


def _unmasked_vocabulary() -> None:
    """Every tensor-parallel rank adds its first row for tokens that are not its own."""
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    def forward(self: Any, input_: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import layers

        low, high = self.vocab_start_index, self.vocab_end_index
        index = torch.where((input_ >= low) & (input_ < high), input_ - low, torch.zeros_like(input_))
        return layers.reduce_from_tensor_model_parallel_region(self.weight[index], group=self.tp_group)

    VocabParallelEmbedding.forward = forward


def _dropout_rate(chunks: Chunks, optimizer: Any) -> None:
    for layer in range(4):
        module = named(chunks, f"decoder.layers.{layer}.self_attention.core_attention.attention_dropout")
        if module is not None:
            module.p = 0.3


FAULTS = {
    "same_samples": Fault(_index(_same_samples)),
    "repeated_microbatch": Fault(_index(_again)),
    "unshifted_labels": Fault(_batch(_unshifted)),
    "positions_without_offset": Fault(_batch(_positions)),
    "mask_off_by_one": Fault(_batch(_mask_off_by_one)),
    "layer_without_mask": Fault(ready=_no_mask),
    "probabilities_scaled": Fault(
        ready=_scaled("decoder.layers.1.self_attention.core_attention.scale_mask_softmax", 1.1)
    ),
    "softmax_scale_everywhere": Fault(ready=_softmax_scale),
    "norm_epsilon": Fault(ready=_epsilon),
    "norm_left_out": Fault(ready=_norm_left_out),
    "half_residual": Fault(ready=_no_residual),
    "rng_not_restored": Fault(_rng_not_restored),
    "stale_receive": Fault(_stale_receive),
    "changed_on_the_way": Fault(_changed_on_the_way),
    "rotary_base": Fault(ready=_rotary_base),
    "router_not_normalised": Fault(ready=_routing(lambda probs, routed: (probs * 0.7, routed))),
    "one_expert_less": Fault(ready=_routing(_one_expert_less)),
    "token_lost": Fault(ready=_lost_tokens),
    "loss_by_twice_the_tokens": Fault(_token_loss(lambda total, count, report: (total, count * 2, report))),
    "loss_by_microbatches_again": Fault(_token_loss(lambda total, count, report: (total / 4, count, report))),
    "reported_half": Fault(
        _token_loss(lambda total, count, report: (total, count, {"lm loss": report["lm loss"] / 2}))
    ),
    "label_forgotten": Fault(_wrong_label),
    "softmax_in_bf16": Fault(ready=_norm_bf16),
    "mlp_skipped": Fault(ready=_layer_skipped),
    "attention_doubled": Fault(ready=_scaled("decoder.layers.1.self_attention.core_attention", 2.0)),
    "embedding_scaled_between": Fault(ready=_between("embedding", lambda output: output * 1.01)),
    "attention_scaled_between": Fault(
        ready=_between("decoder.layers.1.self_attention", lambda output: (output[0] * 0.9, *output[1:]))
    ),
    "scores_out_of_bounds": Fault(
        ready=_between(
            "decoder.layers.1.self_attention.core_attention.scale_mask_softmax", before=lambda scores: scores * 1e3
        )
    ),
    "queries_scaled": Fault(
        ready=_between("decoder.layers.1.self_attention.core_attention", before=lambda query: query * 1.1)
    ),
    "layer_in_half_precision": Fault(ready=_half_precision),
    "one_rank_rounds_otherwise": Fault(ready=_rounds_otherwise),
    "negative_loss": Fault(_negative_loss),
    "masked": Fault(_masked(ignored=False)),
    "mask_ignored": Fault(_masked(ignored=True)),
    "label_counts_less": Fault(_label_counts_less),
    "vocabulary_not_masked": Fault(_unmasked_vocabulary),
    "dropout_rate": Fault(ready=_dropout_rate),
    "loss_by_context_ranks": Fault(_token_loss(lambda total, count, report: (total * 2, count, report))),
}
