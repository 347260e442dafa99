"""Site: attention, routers and weights, for figures that are more than statistics of one tensor.

Hooks on the modules that compute attention scores and choose experts; weights are looked at before the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from msprobe_megatron.clock import Clock
from msprobe_megatron.probes.metrics import Metrics
from msprobe_megatron.sites.arguments import own_work
from msprobe_megatron.sites.gradients import WatchedParameters
from msprobe_megatron.sites.modules import parameter_names
from msprobe_megatron.topology import names
from msprobe_megatron.topology.dtensors import local_part

Fault = Callable[[BaseException, str], None]
_ATTENTION = ("DotProductAttention", "TEDotProductAttention", "CoreAttention")
_POSITIONS = 4  # dimensions of queries and keys: positions, samples, heads, width
_MATRIX = 2
# Their rows are tokens: a largest singular value says nothing about them.
_NO_MATRICES = ("embedding", "output_layer")


class MetricSite:
    """The modules and weights whose metrics are asked for.

    Example::

        site = MetricSite(chunks, watched, metrics, clock, fault, ("attention", "router"))
        site.install(); ...; site.weights(); site.remove()
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        watched: WatchedParameters,
        metrics: Metrics,
        clock: Clock,
        fault: Fault,
        asked: Sequence[str],
        wanted: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._metrics, self._clock, self._fault = metrics, clock, fault
        self._hooks: list[tuple[nn.Module, Any]] = []
        self._handles: list[Any] = []
        self._active = False
        self.found: dict[str, int] = dict.fromkeys(asked, 0)
        for index, chunk in enumerate(chunks):
            for entry in names.modules(chunk):
                if not wanted(entry.name):
                    continue
                kind = type(entry.module).__name__
                if "attention" in asked and kind in _ATTENTION and not _cut_sequence(entry.module):
                    self._add("attention", entry, self._attention(entry, index))
                elif "router" in asked and kind.endswith("Router") and hasattr(entry.module, "weight"):
                    self._add("router", entry, self._router(entry, index))
        self._matrices = [
            (chunk, entry)
            for chunk, _, entry in watched.entries
            if "stable_rank" in asked
            and entry.parameter.dim() == _MATRIX
            and not any(word in entry.name for word in _NO_MATRICES)
        ]
        if "stable_rank" in asked:
            self.found["stable_rank"] = len(self._matrices)

    def _add(self, what: str, entry: names.NamedModule, hook: Any) -> None:
        self._hooks.append((entry.module, hook))
        self.found[what] += 1

    def install(self) -> None:
        """Set the hooks, or use those that are still there."""
        self._active = True
        if not self._handles:
            self._handles = [m.register_forward_hook(hook, with_kwargs=True) for m, hook in self._hooks]

    def pause(self) -> None:
        """See nothing; leave the hooks."""
        self._active = False

    def resume(self) -> None:
        """See again."""
        self._active = True

    def remove(self) -> None:
        """Take the hooks away. Safe to call twice."""
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def weights(self) -> None:
        """Look at the weights, as they are now."""
        with torch.no_grad():
            for chunk, entry in self._matrices:
                self._metrics.weight(entry.name, chunk, local_part(entry.parameter).detach())

    def _attention(self, entry: names.NamedModule, chunk: int) -> Callable[..., None]:
        known = parameter_names(entry.module)

        def look(module: nn.Module, given: dict[str, Any], output: Any, microbatch: int) -> None:
            query, key = (given.get(name, given.get(f"{name}_layer")) for name in ("query", "key"))
            if given.get("packed_seq_params") is not None or not isinstance(query, torch.Tensor):
                return  # several sequences in one: rows of them cannot be told apart here
            if query.dim() == _POSITIONS and isinstance(key, torch.Tensor):
                mask = given.get("attention_mask")
                if isinstance(mask, torch.Tensor) and not _fits(mask, query.shape[0], key.shape[0]):
                    return  # of positions that are not those of these keys
                self._metrics.attention(entry.name, chunk, module, query, key, mask, microbatch)

        return self._hook(entry.name, known, look)

    def _router(self, entry: names.NamedModule, chunk: int) -> Callable[..., None]:
        known = parameter_names(entry.module)

        def look(module: nn.Module, given: dict[str, Any], output: Any, microbatch: int) -> None:
            hidden = given.get(known[0]) if known else None
            if isinstance(hidden, torch.Tensor):
                self._metrics.router(entry.name, chunk, module, hidden, output, microbatch)

        return self._hook(entry.name, known, look)

    def _hook(
        self, name: str, known: tuple[str, ...], look: Callable[[nn.Module, dict[str, Any], Any, int], None]
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
                with own_work(), torch.no_grad():
                    look(module, given, kwargs_and_output[-1], moment.microbatch)
            except Exception as error:
                self._fault(error, f"metrics of {name}")

        return hook


def _cut_sequence(module: nn.Module) -> bool:
    """Whether other ranks hold the keys of a part of the sequence: entropy over the rest would be another figure."""
    return getattr(getattr(module, "config", None), "context_parallel_size", 1) > 1


def _fits(mask: torch.Tensor, rows: int, columns: int) -> bool:
    return mask.dim() >= _MATRIX and mask.shape[-2] in (1, rows) and mask.shape[-1] in (1, columns)
