"""Site: metrics of attention, routers and weights: numbers that are more than statistics of one tensor.

Hooks on the modules that compute attention scores and choose experts; weights are read before the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.measure.metrics import (
    SpectralNorms,
    attention_sample,
    expert_load,
    router_entropy,
    stable_rank,
)
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.module.hooks import HookedSite
from msprobe_megatron.job.sites.module.modules import parameter_names
from msprobe_megatron.job.sites.sink import TensorSink
from msprobe_megatron.job.sites.training.gradients import WatchedParameters
from msprobe_megatron.topology import names
from msprobe_megatron.topology.shards import Place, ShardSpec
from msprobe_megatron.topology.shards_of.dtensors import local_part

_SPEC = ShardSpec.unmergeable("a sample of what this rank has")


class Metrics:
    """Computes metrics and reports them as rows of kind ``scalar``, named after their module or weight."""

    def __init__(self, sink: TensorSink) -> None:
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
        self._report(name, "attention_entropy", vpp, sample.entropy, microbatch)
        self._report(name, "attention_logit", vpp, sample.largest, microbatch)

    def router(self, name: str, vpp: int, module: Any, hidden: torch.Tensor, output: Any, microbatch: int) -> None:
        """Load of each expert, number of dropped tokens, entropy of the routing."""
        weight = module.weight
        experts = int(weight.shape[0])
        routing = output[1] if isinstance(output, tuple | list) and len(output) > 1 else output
        load = expert_load(routing, experts)
        self._report(name, "expert_load", vpp, load, microbatch)
        chosen = getattr(module, "topk", None)
        if isinstance(chosen, int):
            tokens = hidden.numel() // hidden.shape[-1]
            self._report(name, "dropped_tokens", vpp, tokens * chosen - load.sum(), microbatch)
        self._report(name, "router_entropy", vpp, router_entropy(hidden, weight), microbatch)

    def weight(self, name: str, vpp: int, weight: torch.Tensor) -> None:
        """Spectral norm and stable rank of this rank's part of a matrix."""
        norm = self._norms(name, weight)
        self._report(name, "spectral_norm", vpp, norm, None, "optimizer")
        self._report(name, "stable_rank", vpp, stable_rank(weight, norm), None, "optimizer")

    def _report(
        self, name: str, io: str, vpp: int, metric: torch.Tensor, microbatch: int | None, phase: str = "forward"
    ) -> None:
        place = self._places.get((name, io))
        if place is None:
            place = self._places[name, io] = Place("scalar", name, io, "", "", vpp, -1, _spec, _one)
        self._sink.see(place, metric, microbatch, phase)


def _spec(shape: tuple[int, ...]) -> ShardSpec:
    return _SPEC


def _one(axis: str) -> int:
    return 1


Fault = Callable[[BaseException, str], None]
_ATTENTION = ("DotProductAttention", "TEDotProductAttention", "CoreAttention")
_POSITIONS = 4  # dimensions of queries and keys: positions, samples, heads, width
_MATRIX = 2
# Rows are tokens: the largest singular value of these says nothing.
_NO_MATRICES = ("embedding", "output_layer")


class MetricSite(HookedSite):
    """The modules and weights whose metrics are requested."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        watched: WatchedParameters,
        metrics: Metrics,
        clock: Clock,
        fault: Fault,
        requested: Sequence[str],
        wanted: Callable[[str], bool] = lambda name: True,
    ) -> None:
        super().__init__()
        self._metrics, self._clock, self._fault = metrics, clock, fault
        self._hooks: list[tuple[nn.Module, Any]] = []
        self.found: dict[str, int] = dict.fromkeys(requested, 0)
        """By metric: how many modules or weights have it."""
        for index, chunk in enumerate(chunks):
            for entry in names.modules(chunk):
                if not wanted(entry.name):
                    continue
                kind = type(entry.module).__name__
                if "attention" in requested and kind in _ATTENTION and not _splits_sequence(entry.module):
                    self._add("attention", entry, self._attention(entry, index))
                elif "router" in requested and kind.endswith("Router") and hasattr(entry.module, "weight"):
                    self._add("router", entry, self._router(entry, index))
        self._matrices = [
            (chunk, entry)
            for chunk, _, entry in watched.entries
            if "stable_rank" in requested
            and entry.parameter.dim() == _MATRIX
            and not any(word in entry.name for word in _NO_MATRICES)
        ]
        if "stable_rank" in requested:
            self.found["stable_rank"] = len(self._matrices)

    def _add(self, what: str, entry: names.NamedModule, hook: Any) -> None:
        self._hooks.append((entry.module, hook))
        self.found[what] += 1

    def install(self) -> None:
        """Set the hooks, or reuse those that are still set."""
        self._active = True
        if not self._handles:
            self._handles = [m.register_forward_hook(hook, with_kwargs=True) for m, hook in self._hooks]

    def weights(self) -> None:
        """Report the metrics of the weights as they are now."""
        with torch.no_grad():
            for chunk, entry in self._matrices:
                self._metrics.weight(entry.name, chunk, local_part(entry.parameter).detach())

    def _attention(self, entry: names.NamedModule, chunk: int) -> Callable[..., None]:
        known = parameter_names(entry.module)

        def measure(module: nn.Module, given: dict[str, Any], output: Any, microbatch: int) -> None:
            query, key = (given.get(name, given.get(f"{name}_layer")) for name in ("query", "key"))
            if given.get("packed_seq_params") is not None or not isinstance(query, torch.Tensor):
                return  # packed sequences: their rows cannot be told apart here
            if query.dim() == _POSITIONS and isinstance(key, torch.Tensor):
                mask = given.get("attention_mask")
                if isinstance(mask, torch.Tensor) and not _fits(mask, query.shape[0], key.shape[0]):
                    return  # the mask does not belong to these keys
                self._metrics.attention(entry.name, chunk, module, query, key, mask, microbatch)

        return self._hook(entry.name, known, measure)

    def _router(self, entry: names.NamedModule, chunk: int) -> Callable[..., None]:
        known = parameter_names(entry.module)

        def measure(module: nn.Module, given: dict[str, Any], output: Any, microbatch: int) -> None:
            hidden = given.get(known[0]) if known else None
            if isinstance(hidden, torch.Tensor):
                self._metrics.router(entry.name, chunk, module, hidden, output, microbatch)

        return self._hook(entry.name, known, measure)

    def _hook(
        self, name: str, known: tuple[str, ...], measure: Callable[[nn.Module, dict[str, Any], Any, int], None]
    ) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> None:
            if not self._active or (self._clock.away and self._clock.apart()):
                return
            try:
                phase, moment = self._clock.calling()
                if phase != "forward":
                    return
                kwargs = kwargs_and_output[0] if len(kwargs_and_output) > 1 else {}
                given = {**dict(zip(known, args, strict=False)), **kwargs}
                with untraced(), torch.no_grad():
                    measure(module, given, kwargs_and_output[-1], moment.microbatch)
            except Exception as error:
                self._fault(error, f"metrics of {name}")

        return hook


def _splits_sequence(module: nn.Module) -> bool:
    """Whether other ranks hold part of the keys (context parallelism): entropy over the rest would be wrong."""
    return getattr(getattr(module, "config", None), "context_parallel_size", 1) > 1


def _fits(mask: torch.Tensor, rows: int, columns: int) -> bool:
    return mask.dim() >= _MATRIX and mask.shape[-2] in (1, rows) and mask.shape[-1] in (1, columns)
