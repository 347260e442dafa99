"""Faults of distributed training, put into Megatron inside a forked rank before it trains; never in the package.

A fault has two chances: `before` the model is built (functions of megatron.core are replaced), and `ready`, when chunks
and optimizer exist (modules and weights are changed). Both run on every rank.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Chunks = list[torch.nn.Module]


def _nothing(*args: Any) -> None:
    return None


@dataclass(frozen=True)
class Fault:
    before: Callable[[], None] = _nothing
    ready: Callable[[Chunks], None] = _nothing


def train(argv: list[str], fault: str) -> list[float]:
    """Train in this rank with a fault inside."""
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks
    from tests.jobs.compare.silent_casts import CASTS
    from tests.jobs.compare.wrong_wiring import WIRING

    chosen = {**FAULTS, **CASTS, **WIRING}[fault]
    chosen.before()
    return run(argv, Callbacks(ready=lambda chunks, optimizer: chosen.ready(chunks))).losses


def named(chunks: Chunks, name: str) -> torch.nn.Module | None:
    """The module of this canonical name, if this rank has it."""
    from msprobe_megatron.topology import names

    return next((entry.module for chunk in chunks for entry in names.modules(chunk) if entry.name == name), None)


def weight(chunks: Chunks, name: str) -> torch.nn.Parameter | None:
    """The weight of this canonical name, if this rank has it."""
    from msprobe_megatron.topology import names

    return next((p.parameter for chunk in chunks for p in names.parameters(chunk) if p.name == name), None)


def around(module: torch.nn.Module, change: Callable[..., Any]) -> None:
    """Replace the forward of one module: `change(original, *args, **kwargs)`."""
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    module.forward = forward


def _rank(axis: str) -> int:
    from msprobe_megatron.topology import coordinates

    return coordinates.current().of(axis)


def _no_reduction(chunks: Chunks) -> None:
    from megatron.core.tensor_parallel import layers

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        reduce = layers.reduce_from_tensor_model_parallel_region
        layers.reduce_from_tensor_model_parallel_region = lambda tensor, *a, **k: tensor
        try:
            return original(*args, **kwargs)
        finally:
            layers.reduce_from_tensor_model_parallel_region = reduce

    around(named(chunks, "decoder.layers.2.mlp.linear_fc2"), forward)


def _norms_not_reduced() -> None:
    # The package has a function of the module's name, so that an import statement would find the function.
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    module._allreduce_non_tensor_model_parallel_grads = _nothing


def _attention_memory(value: float) -> None:
    """No fault: the memory that attention passes to a product with beta=0, which does not read it."""
    from megatron.core.utils import GlobalMemoryBuffer

    original = GlobalMemoryBuffer.get_tensor
    GlobalMemoryBuffer.get_tensor = lambda *args, **kwargs: original(*args, **kwargs).fill_(value)


def _weights_grow() -> None:
    """Every step of the optimizer makes every weight larger by one percent."""
    original = torch.optim.Adam.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1.01)
        return result

    torch.optim.Adam.step = step


def _gradient_norm(change: Callable[[float], float]) -> None:
    """The norm of the gradients comes out wrong; the gradients are right."""
    from megatron.core.optimizer import clip_grads, optimizer

    original = clip_grads.get_grad_norm_fp32

    def wrong(*args: Any, **kwargs: Any) -> float:
        return change(original(*args, **kwargs))

    for module in (clip_grads, optimizer):
        module.get_grad_norm_fp32 = wrong


def _scores_of_layer_1(chunks: Chunks) -> None:
    named(chunks, "decoder.layers.1.self_attention.core_attention").softmax_scale *= math.sqrt(2)


def _attention_scale(chunks: Chunks) -> None:
    if _rank("tp") == 1:
        named(chunks, "decoder.layers.1.self_attention.core_attention").softmax_scale *= math.sqrt(2)


def _no_mask(chunks: Chunks) -> None:
    """Rank 1 lets the positions of layer 1 see the future: the mask is lost."""
    if _rank("tp") == 1:
        softmax = named(chunks, "decoder.layers.1.self_attention.core_attention.scale_mask_softmax")

        def forward(original: Any, scores: torch.Tensor, mask: torch.Tensor, *more: Any) -> Any:
            return original(scores, torch.zeros_like(mask), *more)

        around(softmax, forward)


def _norm_eps(chunks: Chunks) -> None:
    """Rank 1 has another epsilon in the first norm of every layer, whose tensors all ranks hold alike."""
    from msprobe_megatron.topology import names

    if _rank("tp") == 1:
        for entry in (entry for chunk in chunks for entry in names.modules(chunk)):
            if entry.name.endswith(".input_layernorm"):
                entry.module.eps = 1e-2


def _rotary_without_offset() -> None:
    from megatron.core.models.common.embeddings import rotary_pos_embedding as module

    module.get_pos_emb_on_this_cp_rank = lambda emb, dim, group: emb.chunk(group.size(), dim)[0]


def _loss_by_wrong_count() -> None:
    from msprobe_megatron.lab.demo import train as demo

    original = demo.token_loss

    def token_loss(losses: torch.Tensor) -> Any:
        total, count, report = original(losses)
        return total, count * 2, report

    demo.token_loss = token_loss


def _gate_and_up(chunks: Chunks) -> None:
    """As a converter that cuts [gate; up] into contiguous halves: rank 0 gets all of gate, rank 1 all of up."""
    from megatron.core import parallel_state

    for name in ("weight", "bias"):
        value = weight(chunks, f"decoder.layers.1.mlp.linear_fc1.{name}")
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(value) for _ in range(group.size())]
        torch.distributed.all_gather(parts, value.data.clone(), group=group)
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        value.data.copy_(torch.cat([*gates, *ups]).chunk(group.size())[group.rank()])


def _dropped_microbatch(chunks: Chunks) -> None:
    seen = []

    def hook(gradient: torch.Tensor) -> torch.Tensor | None:
        seen.append(None)
        return torch.zeros_like(gradient) if len(seen) == 2 else None

    weight(chunks, "decoder.layers.2.self_attention.linear_proj.weight").register_hook(hook)


def _stale_weight(chunks: Chunks) -> None:
    """Rank 1 goes on with the first weights of one layer from the third step on (8 samples, 2 microbatches a step)."""
    module = named(chunks, "decoder.layers.1.mlp.linear_fc1")
    old, calls = module.weight.detach().clone(), []

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if _rank("dp") == 1 and len(calls) > 4:
            module.weight.data.copy_(old)
        return original(*args, **kwargs)

    around(module, forward)


def _expert_not_loaded(chunks: Chunks) -> None:
    value = weight(chunks, "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight")
    if value is not None:
        value.data.normal_(std=0.02, generator=torch.Generator().manual_seed(0))


def _layer_offset() -> None:
    from megatron.core.transformer import transformer_layer as module

    original = module.get_transformer_layer_offset
    module.get_transformer_layer_offset = lambda config, vp_stage=None, pp_rank=None: original(config, 0, pp_rank)


def _no_max_over_ranks() -> None:
    from megatron.core.tensor_parallel import cross_entropy as module

    real = torch.distributed

    class Distributed:
        ReduceOp = real.ReduceOp

        @staticmethod
        def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> Any:
            return None if op == real.ReduceOp.MAX else real.all_reduce(tensor, op=op, group=group)

    class Torch:
        distributed = Distributed

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    module.torch = Torch()


def _flipped_bit(chunks: Chunks) -> None:
    value = weight(chunks, "decoder.layers.2.self_attention.linear_proj.weight")
    if _rank("tp") == 1:
        value.data.view(torch.int32)[3, 5] ^= 1 << 21


def _flipped_last_bit(chunks: Chunks) -> None:
    value = weight(chunks, "decoder.layers.2.self_attention.linear_proj.weight")
    if _rank("tp") == 1:
        value.data.view(torch.int32)[3, 5] ^= 1


def _rows_swapped(chunks: Chunks) -> None:
    """Two positions of one sample change places inside a module: every statistic stays what it was."""

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        return torch.cat([output[1:2], output[:1], output[2:]])

    module = named(chunks, "decoder.layers.1.input_layernorm")
    if module is not None:
        around(module, forward)


def _expert_rows_swapped(chunks: Chunks) -> None:
    """Two tokens change places inside an expert: every statistic of its output stays what it was."""

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        output, bias = original(*args, **kwargs)
        return torch.cat([output[1:2], output[:1], output[2:]]), bias

    module = named(chunks, "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1")
    if module is not None:
        around(module, forward)


def _other_data() -> None:
    from msprobe_megatron.lab.demo import data

    original = data.sample
    data.sample = lambda seed, index, length, vocabulary: original(seed, index + 100, length, vocabulary)


def _nan_in_weight(chunks: Chunks) -> None:
    value = weight(chunks, "decoder.layers.2.mlp.linear_fc2.weight")
    if value is not None and _rank("tp") == 1:
        value.data[0, 0] = float("nan")


def _nan_in_data() -> None:
    """The second microbatch comes with a mask of losses that holds a NaN."""
    from msprobe_megatron.lab.demo import train as demo

    calls = []

    def forward_step(reader: Any, model: torch.nn.Module) -> Any:
        calls.append(None)
        batch = next(reader)
        mask = torch.ones(batch["tokens"].shape)
        if len(calls) == 2:
            mask[0, 0] = float("nan")
        places = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
        output = model(*places, labels=batch["labels"], loss_mask=mask)
        return output, lambda losses: demo.token_loss(losses * mask)

    demo.forward_step = forward_step


def _nan_in_reduction(chunks: Chunks) -> None:
    """Rank 1 gets a NaN out of one all-reduce."""
    from megatron.core.tensor_parallel import layers

    def damaged(reduce: Any) -> Any:
        def region(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            reduced = reduce(tensor, *args, **kwargs).clone()
            if _rank("tp") == 1:
                reduced.view(-1)[7] = float("nan")
            return reduced

        return region

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        reduce = layers.reduce_from_tensor_model_parallel_region
        layers.reduce_from_tensor_model_parallel_region = damaged(reduce)
        try:
            return original(*args, **kwargs)
        finally:
            layers.reduce_from_tensor_model_parallel_region = reduce

    around(named(chunks, "decoder.layers.1.self_attention.linear_proj"), forward)


def _nan_on_the_way() -> None:
    """The first tensor that a stage receives from the one before is damaged."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    original, calls = P2PCommunicator.recv_forward, []

    def recv_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        received = original(self, *args, **kwargs)
        for tensor in received if isinstance(received, list) else [received]:
            if tensor is not None:
                calls.append(None)
                if len(calls) == 1:
                    tensor.data.view(-1)[5] = float("nan")
        return received

    P2PCommunicator.recv_forward = recv_forward


def _nan_in_operator(chunks: Chunks) -> None:
    module = named(chunks, "decoder.layers.1.pre_mlp_layernorm")
    calls = []

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        output = original(*args, **kwargs)
        if len(calls) == 2:
            output = output.clone()
            output.view(-1)[0] = float("inf")
        return output

    if module is not None:
        around(module, forward)


FAULTS = {
    "none": Fault(),
    "again": Fault(),
    "no_reduction": Fault(ready=_no_reduction),
    "norms_not_reduced": Fault(before=_norms_not_reduced),
    "memory_of_nan": Fault(before=lambda: _attention_memory(math.nan)),
    "memory_of_others": Fault(before=lambda: _attention_memory(1e20)),
    "weights_grow": Fault(before=_weights_grow),
    "norm_counted_twice": Fault(before=lambda: _gradient_norm(lambda norm: norm * math.sqrt(2))),
    "norm_of_this_rank": Fault(before=lambda: _gradient_norm(lambda norm: norm * (0.7 + 0.1 * _rank("tp")))),
    "scores_of_layer_1": Fault(ready=_scores_of_layer_1),
    "attention_scale": Fault(ready=_attention_scale),
    "no_mask": Fault(ready=_no_mask),
    "norm_eps": Fault(ready=_norm_eps),
    "rotary_without_offset": Fault(before=_rotary_without_offset),
    "loss_by_wrong_count": Fault(before=_loss_by_wrong_count),
    "gate_and_up": Fault(ready=_gate_and_up),
    "dropped_microbatch": Fault(ready=_dropped_microbatch),
    "stale_weight": Fault(ready=_stale_weight),
    "expert_not_loaded": Fault(ready=_expert_not_loaded),
    "layer_offset": Fault(before=_layer_offset),
    "no_max_over_ranks": Fault(before=_no_max_over_ranks),
    "flipped_bit": Fault(ready=_flipped_bit),
    "flipped_last_bit": Fault(ready=_flipped_last_bit),
    "rows_swapped": Fault(ready=_rows_swapped),
    "expert_rows_swapped": Fault(ready=_expert_rows_swapped),
    "other_data": Fault(before=_other_data),
    "nan_in_data": Fault(before=_nan_in_data),
    "nan_in_reduction": Fault(ready=_nan_in_reduction),
    "nan_on_the_way": Fault(before=_nan_on_the_way),
    "nan_in_weight": Fault(ready=_nan_in_weight),
    "nan_in_operator": Fault(ready=_nan_in_operator),
}
