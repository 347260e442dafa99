"""The forward pass of tiny_gpt's dense model written out in NumPy float64: what the loss has to be."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tests.unit.job.devices.tiny_gpt import HEADS, HIDDEN, LAYERS, SAMPLES, SEQUENCE, VOCABULARY, sample, whole_weight

Array = NDArray[np.float64]
_erf = np.vectorize(math.erf)


def _weight(name: str, *shape: int) -> Array:
    return whole_weight(name, list(shape)).numpy().astype(np.float64)


def _norm(x: Array, name: str) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * _weight(f"{name}.weight", HIDDEN) + _weight(f"{name}.bias", HIDDEN)


def _linear(x: Array, name: str, outputs: int) -> Array:
    return x @ _weight(f"{name}.weight", outputs, x.shape[-1]).T + _weight(f"{name}.bias", outputs)


def _rotate(x: Array) -> Array:
    """Rotary embedding of [s, heads, d]: the two halves of a head are the parts of complex numbers."""
    half = x.shape[-1] // 2
    angle = np.outer(np.arange(SEQUENCE), 10000.0 ** (-np.arange(half) / half))[:, None, :]
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate((turned.real, turned.imag), -1)


def _attention(x: Array, name: str, rotary: bool) -> Array:
    width = HIDDEN // HEADS
    query, key, value = np.split(
        _linear(x, f"{name}.linear_qkv", 3 * HIDDEN).reshape(SEQUENCE, HEADS, 3 * width), 3, axis=-1
    )
    if rotary:
        query, key = _rotate(query), _rotate(key)
    scores = np.einsum("qhd,khd->hqk", query, key) / math.sqrt(width)
    scores = np.where(np.tri(SEQUENCE, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", weights, value).reshape(SEQUENCE, HIDDEN)
    return _linear(mixed, f"{name}.linear_proj", HIDDEN)


def _mlp(x: Array, name: str) -> Array:
    inner = _linear(x, f"{name}.linear_fc1", 4 * HIDDEN)
    return _linear(inner * 0.5 * (1 + _erf(inner / math.sqrt(2))), f"{name}.linear_fc2", HIDDEN)


def first_loss(rotary: bool = False, layers: int = LAYERS) -> float:
    """Mean cross-entropy over all samples before any update."""
    embedding = _weight("embedding.word_embeddings.weight", VOCABULARY, HIDDEN)
    losses = []
    for index in range(SAMPLES):
        tokens = sample(index).numpy()
        x = embedding[tokens[:-1]]
        if not rotary:
            x = x + _weight("embedding.position_embeddings.weight", SEQUENCE, HIDDEN)
        for layer in (f"decoder.layers.{number}" for number in range(layers)):
            x = x + _attention(_norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attention", rotary)
            x = x + _mlp(_norm(x, f"{layer}.pre_mlp_layernorm"), f"{layer}.mlp")
        logits = _norm(x, "decoder.final_layernorm") @ embedding.T
        logits -= logits.max(-1, keepdims=True)
        log_sum = np.log(np.exp(logits).sum(-1))
        losses.append(log_sum - logits[np.arange(SEQUENCE), tokens[1:]])
    return float(np.mean(losses))
