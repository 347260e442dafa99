"""Faults in the special parts of the models, and repairs of megatron-core's own, put into a forked rank.

megatron-core 0.16.1 itself is wrong in a few layouts; the kit names each of them (test_megatrons_own_faults). `repair`
makes these layouts right, so that clean runs can be compared; the faults put them back.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from tests.jobs.compare.faults import around, named, weight

Chunks = list[torch.nn.Module]
UNREPAIRED = "MODELS_OF_TESTS_UNREPAIRED"


def repair() -> None:
    """Make megatron-core's local modules right in every layout; not where the environment asks for them as they are."""
    if os.environ.get(UNREPAIRED):
        return
    _repair_positions_of_keys()
    _repair_count_of_predictions()
    _repair_biases_of_experts()
    _repair_norm_of_sinks()


def _repair_positions_of_keys() -> None:
    """Multi-latent attention x TP: the gradient of k_pos_emb, which all heads share, is not summed over TP."""
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
    from megatron.core.transformer import multi_latent_attention as module

    apply = module.apply_rotary_pos_emb

    def shared(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Keys have one head at this point, queries those of the rank.
        return apply(copy_to_tensor_model_parallel_region(t) if t.shape[-2] == 1 else t, *args, **kwargs)

    module.apply_rotary_pos_emb = shared


def _repair_count_of_predictions() -> None:
    """Multi-token prediction x CP: every rank divides by the number of its own tokens."""
    from megatron.core.models.gpt import gpt_model as module

    roll = module.roll_tensor

    def rolled(tensor: torch.Tensor, *args: Any, cp_group: Any = None, **kwargs: Any) -> Any:
        found, count = roll(tensor, *args, cp_group=cp_group, **kwargs)
        if cp_group is not None and cp_group.size() > 1:
            total = torch.as_tensor(count, dtype=torch.float32).clone()
            torch.distributed.all_reduce(total, group=cp_group)
            count = total / cp_group.size()
        return found, count

    module.roll_tensor = rolled


def _repair_biases_of_experts() -> None:
    """Biases of experts x TP: marked as sequence-parallel, so gradients of other experts are added over TP; and counted
    in the norm of gradients on one rank of TP only, though the experts of the others are different ones.
    """
    from megatron.core.transformer.mlp import MLP

    build = MLP.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for linear in (self.linear_fc1, self.linear_fc2):
            if getattr(linear, "is_expert", False) and getattr(linear, "bias", None) is not None:
                linear.bias.sequence_parallel = False
                linear.bias.tensor_model_parallel = True

    MLP.__init__ = built


def _repair_norm_of_sinks() -> None:
    """Sinks x TP: not marked as tensor-parallel, so that the norm of gradients counts those of one rank only."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    build = DotProductAttention.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if self.softmax_offset is not None:
            self.softmax_offset.tensor_model_parallel = True

    DotProductAttention.__init__ = built


def _nothing(chunks: Chunks) -> None:
    return None


def _scaled(name: str, factor: float = 1.5) -> Callable[[Chunks], None]:
    """The first output of a module comes out too large."""

    def fault(chunks: Chunks) -> None:
        module = named(chunks, name)
        if module is None:
            return

        def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

        around(module, forward)

    return fault


def _weight_rows_swapped(name: str) -> Callable[[Chunks], None]:
    """As a converter that takes the parts of a packed weight in another order: the two halves change places."""

    def fault(chunks: Chunks) -> None:
        value = weight(chunks, name)
        if value is not None:
            value.data.copy_(torch.cat(list(value.data.chunk(2))[::-1]))

    return fault


def _weight_added(name: str, amount: float = 0.02) -> Callable[[Chunks], None]:
    def fault(chunks: Chunks) -> None:
        value = weight(chunks, name)
        if value is not None:
            value.data.add_(amount)

    return fault


def _setting(name: str, setting: str, value: Any) -> Callable[[Chunks], None]:
    def fault(chunks: Chunks) -> None:
        module = named(chunks, name)
        if module is not None:
            setattr(module, setting, value)

    return fault


def _predictions_scaled(chunks: Chunks) -> None:
    """The gradient of the losses of multi-token prediction is too large."""
    from megatron.core.models.gpt import gpt_model

    apply = gpt_model.MTPLossAutoScaler.apply

    class Scaler:
        @staticmethod
        def apply(hidden: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
            return apply(hidden, loss * 1.5)

    gpt_model.MTPLossAutoScaler = Scaler


def _expert_bias(chunks: Chunks) -> None:
    """One expert's bias of the router of layer 2 starts from another value."""
    router = named(chunks, "decoder.layers.2.mlp.router")
    if router is not None:
        router.expert_bias[1] += 5.0


def _expert_bias_update(chunks: Chunks) -> None:
    """The biases of routers move twice as far as configured."""
    # The package has a function of the module's name, so that an import statement would find the function.
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    update = module.get_updated_expert_bias
    module.get_updated_expert_bias = lambda tokens, bias, rate: update(tokens, bias, 2 * rate)


FAULTS: dict[str, Callable[[Chunks], None]] = {
    "none": _nothing,
    "key_norm": _scaled("decoder.layers.1.self_attention.k_layernorm"),
    "query_norm": _weight_added("decoder.layers.2.self_attention.q_layernorm.weight"),
    "qkv_order": _weight_rows_swapped("decoder.layers.1.self_attention.linear_qkv.weight"),
    "latent": _scaled("decoder.layers.1.self_attention.linear_kv_down_proj"),
    "shared_expert": _scaled("decoder.layers.2.mlp.shared_experts", 0.0),
    "predictions": _predictions_scaled,
    "expert_bias": _expert_bias,
    "expert_bias_update": _expert_bias_update,
    "sink": _weight_added("decoder.layers.1.self_attention.core_attention.softmax_offset", 1.0),
    "window": _setting("decoder.layers.2.self_attention.core_attention.scale_mask_softmax", "window_size", (2, 0)),
    "bias_of_an_expert": _weight_added("decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.bias"),
    "mixer_order": _weight_rows_swapped("decoder.layers.2.mixer.in_proj.weight"),
    "decay": _weight_added("decoder.layers.0.mixer.A_log", 0.5),
    "mixer_norm": _scaled("decoder.layers.2.mixer.norm"),
    "delta_order": _weight_rows_swapped("decoder.layers.1.self_attention.in_proj.weight"),
    "delta_conv": _scaled("decoder.layers.2.self_attention.conv1d"),
    "delta_norm": _weight_added("decoder.layers.0.self_attention.out_norm.weight"),
}
