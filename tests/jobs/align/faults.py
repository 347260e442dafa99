"""Thirteen ways in which a conversion goes wrong, planted into the weights or the settings of the Megatron side."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tests.jobs.align.architectures import HEADS

QKV = "decoder.layers.{}.self_attention.linear_qkv.weight"


class Fault(NamedTuple):
    """Architecture, what is done to the weights, changed settings, and the id that has to be named."""

    architecture: str
    expected: str
    weights: Any = None
    settings: dict[str, Any] = {}
    model: dict[str, Any] = {}


def _parts(whole, groups):
    """Queries, keys and values of every group."""
    width = whole.shape[0] // (groups * (HEADS // groups + 2))
    cut = whole.reshape(groups, HEADS // groups + 2, width, *whole.shape[1:])
    return cut, width


def _q_and_k(weights):
    for layer in range(2):
        cut, _ = _parts(weights[QKV.format(layer)], HEADS)
        weights[QKV.format(layer)] = cut[:, [1, 0, 2]].reshape(weights[QKV.format(layer)].shape)


def _heads_interleaved(weights):
    for layer in range(2):
        whole = weights[QKV.format(layer)]
        cut, width = _parts(whole, 2)
        queries = cut[:, :2].reshape(4, width, -1)[[0, 2, 1, 3]].reshape(2, 2, width, -1)
        weights[QKV.format(layer)] = torch.cat((queries, cut[:, 2:]), 1).reshape(whole.shape)


def _gate_and_up(weights):
    for layer in range(2):
        name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        gate, up = weights[name].chunk(2)
        weights[name] = torch.cat((up, gate))


def _no_bias(weights):
    for layer in range(2):
        del weights[f"decoder.layers.{layer}.self_attention.linear_qkv.bias"]


def _layer_order(weights):
    for name in [name for name in weights if name.startswith("decoder.layers.0.")]:
        other = name.replace("layers.0.", "layers.1.")
        weights[name], weights[other] = weights[other], weights[name]


def _untied(weights):
    generator = torch.Generator().manual_seed(5)
    shape = weights["embedding.word_embeddings.weight"].shape
    weights["output_layer.weight"] = torch.randn(shape, generator=generator) * 0.08


def _experts(weights):
    for what in ("linear_fc1.weight", "linear_fc2.weight"):
        first, second = (f"decoder.layers.1.mlp.experts.local_experts.{e}.{what}" for e in (1, 2))
        weights[first], weights[second] = weights[second], weights[first]


def _latents(weights):
    name = "decoder.layers.0.self_attention.kv_layernorm.weight"
    weights[name] = weights[name] * 1.5


def _vocabulary(weights):
    name = "embedding.word_embeddings.weight"
    weights[name] = torch.roll(weights[name], 1, 0)


def _rotary_rows(weights):
    for layer in range(2):
        whole = weights[QKV.format(layer)]
        cut, width = _parts(whole, 2)
        pairs = cut.reshape(2, 4, 2, width // 2, -1).transpose(2, 3).reshape(cut.shape)
        weights[QKV.format(layer)] = torch.cat((pairs[:, :3], cut[:, 3:]), 1).reshape(whole.shape)


FAULTS = {
    "q and k swapped": Fault("llama_mha", "q-k-swapped", _q_and_k),
    "GQA heads interleaved wrongly": Fault("llama", "gqa-interleaving", _heads_interleaved),
    "gate and up swapped": Fault("llama", "gate-up-swapped", _gate_and_up),
    "rope base": Fault("llama", "setting:rotary_base", model={"rotary_base": 500000}),
    "rope interleaving": Fault("llama", "setting:rotary_interleaved", settings={"rotary_interleaved": True}),
    "rope interleaving in the weights": Fault("llama", "rope-interleaving", _rotary_rows),
    "norm eps": Fault("llama", "setting:layernorm_epsilon", settings={"layernorm_epsilon": 1e-2}),
    "missing bias": Fault("qwen2", "missing-bias", _no_bias, {"add_qkv_bias": False}),
    "wrong layer order": Fault("qwen3", "layer-order", _layer_order),
    "tied embeddings not tied": Fault(
        "llama_tied", "tied-embeddings", _untied, model={"share_embeddings_and_output_weights": False}
    ),
    "one expert swapped": Fault("mixtral", "expert-order", _experts),
    "scale of MLA latents": Fault("deepseek_v3", "scaled", _latents),
    "wrong router normalisation": Fault("qwen3_moe", "router-normalisation", settings={"moe_router_pre_softmax": True}),
    "vocabulary offset": Fault("llama", "vocabulary-offset", _vocabulary),
}
