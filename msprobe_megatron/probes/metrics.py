"""Probe: metrics. Which figures of attention, routers and weights are worked out, and under which names."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from msprobe_megatron.measure.metrics import (
    SpectralNorms,
    attention_sample,
    expert_load,
    router_entropy,
    stable_rank,
)
from msprobe_megatron.topology.places import Place
from msprobe_megatron.topology.shards import ShardSpec

_SPEC = ShardSpec.unmergeable("a sample of what this rank has")


class Sink(Protocol):
    """Who is told of a figure."""

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Take note of a tensor, now."""


class Metrics:
    """Works out figures and tells them as rows of kind ``scalar``, named after their module or weight.

    Example::

        metrics = Metrics(probe)
        metrics.attention("decoder.layers.0.self_attention.core_attention", 0, module, query, key, None, 0)
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._places: dict[tuple[str, str], Place] = {}
        self._norms = SpectralNorms()

    def attention(
        self,
        name: str,
        vpp: int,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        microbatch: int,
    ) -> None:
        """Entropy and largest logit of some rows of attention."""
        scale = getattr(module, "softmax_scale", None)
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        again = getattr(getattr(module, "scale_mask_softmax", None), "scale", None)
        causal = "causal" in str(getattr(module, "attn_mask_type", "causal"))
        sample = attention_sample(query, key, scale * (1.0 if again is None else again), mask, causal=causal)
        self._tell(name, "attention_entropy", vpp, sample.entropy, microbatch)
        self._tell(name, "attention_logit", vpp, sample.largest, microbatch)

    def router(self, name: str, vpp: int, module: Any, hidden: torch.Tensor, output: Any, microbatch: int) -> None:
        """Load of each expert, tokens that were dropped, entropy of the choice."""
        weight = module.weight
        experts = int(weight.shape[0])
        routing = output[1] if isinstance(output, tuple | list) and len(output) > 1 else output
        load = expert_load(routing, experts)
        self._tell(name, "expert_load", vpp, load, microbatch)
        chosen = getattr(module, "topk", None)
        if isinstance(chosen, int):
            tokens = hidden.numel() // hidden.shape[-1]
            self._tell(name, "dropped_tokens", vpp, tokens * chosen - load.sum(), microbatch)
        self._tell(name, "router_entropy", vpp, router_entropy(hidden, weight), microbatch)

    def weight(self, name: str, vpp: int, weight: torch.Tensor) -> None:
        """Spectral norm and stable rank of a matrix, of this rank's part of it."""
        norm = self._norms(name, weight)
        self._tell(name, "spectral_norm", vpp, norm, None, "optimizer")
        self._tell(name, "stable_rank", vpp, stable_rank(weight, norm), None, "optimizer")

    def _tell(
        self, name: str, io: str, vpp: int, figure: torch.Tensor, microbatch: int | None, phase: str = "forward"
    ) -> None:
        place = self._places.get((name, io))
        if place is None:
            place = self._places[name, io] = Place("scalar", name, io, "", "", vpp, -1, _spec, _one)
        self._sink.see(place, figure, microbatch, phase)


def _spec(shape: tuple[int, ...]) -> ShardSpec:
    return _SPEC


def _one(axis: str) -> int:
    return 1
