"""Site: the choices of routers, token by token, so that `compare` can tell a wrong router from rounding.

The function `routing` of a router (Megatron's, and those built like it) takes the logits and returns probabilities and
the chosen experts. It is wrapped while a step is recorded; what it computes is read and not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.measure.routing import Ranking, expert_codes, routing_record
from msprobe_megatron.job.patching.attributes import Wrapper, add_wrapper, remove_wrapper
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.topology import names
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.shards import Place, ShardSpec
from msprobe_megatron.topology.shards_of.activations import ChunkLayout, spec_of_words

Fault = Callable[[BaseException, str], None]
_SEQUENCE_AND_BATCH = 3


class RecordKeeper(Protocol):
    """Takes small tensors that are saved whole."""

    def wants(self, name: str) -> bool:
        """Whether the module of this name is selected."""

    def keep(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Save a tensor now."""


class RoutingSite:
    """Records the choices of all routers of a model between `install` and `remove`."""

    def __init__(
        self, chunks: Sequence[nn.Module], keeper: RecordKeeper, clock: Clock, where: Coordinates, fault: Fault
    ) -> None:
        self._keeper, self._clock, self._where, self._fault = keeper, clock, where, fault
        self._active = self._installed = False
        self._codes: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._wrappers: list[tuple[nn.Module, Wrapper]] = []
        for index, chunk in enumerate(chunks):
            layout = ChunkLayout.of(chunk)
            for entry in names.modules(chunk):
                if is_router(entry.module) and keeper.wants(entry.name):
                    self._wrappers.append((entry.module, self._wrapper(entry, index, layout)))

    def __len__(self) -> int:
        return len(self._wrappers)

    def install(self) -> None:
        """Wrap the routing functions."""
        self._active = self._installed = True
        for module, wrapper in self._wrappers:
            add_wrapper(module, "routing", wrapper)

    def pause(self) -> None:
        """Ignore what the routers do."""
        self._active = False

    def resume(self) -> None:
        """Go on after `pause`."""
        self._active = self._installed

    def remove(self) -> None:
        """Restore the routing functions. Safe to call twice."""
        self._active = self._installed = False
        for module, wrapper in self._wrappers:
            remove_wrapper(module, "routing", wrapper)

    def _wrapper(self, entry: names.NamedModule, chunk: int, layout: ChunkLayout) -> Wrapper:
        def spec(shape: tuple[int, ...]) -> ShardSpec:
            return spec_of_words("S b c" if len(shape) == _SEQUENCE_AND_BATCH else "S*b c", layout)

        op = type(entry.module).__name__
        place = Place("routing", entry.name, "output", "routing", op, chunk, -1, spec, self._where.size)

        def wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
            def routing(*args: Any, **kwargs: Any) -> Any:
                output = function(*args, **kwargs)
                if self._active:
                    self._record(entry, place, args[0] if args else kwargs.get("logits"), output)
                return output

            routing.__wrapped__ = function  # type: ignore[attr-defined]
            routing.observes = True  # type: ignore[attr-defined]
            return routing

        return wrapper

    def _record(self, entry: names.NamedModule, place: Place, logits: Any, output: Any) -> None:
        clock = self._clock
        if clock.away and clock.apart():
            return
        try:
            phase, moment = clock.calling()
            if phase != "forward" or not isinstance(logits, torch.Tensor) or not isinstance(output, tuple):
                return
            experts, chosen = logits.shape[-1], own_choice(output[1], logits, self._where)
            if chosen is None:
                return
            with untraced(), torch.no_grad():
                codes = self._codes.get((experts, logits.device))
                if codes is None:
                    codes = self._codes[experts, logits.device] = expert_codes(experts, logits.device)
                words = routing_record(logits.detach(), chosen, ranking_of(entry.module, logits.dtype), codes)
                words = words.reshape(*logits.shape[:-1], words.shape[-1])
                self._keeper.keep(place, words, moment.microbatch, phase)
        except Exception as error:
            self._fault(error, f"routing of {entry.name}")


def is_router(module: nn.Module) -> bool:
    """Whether a module chooses experts by the scores that its function `routing` gets."""
    kind = type(module).__name__
    sinkhorn = getattr(module, "routing_type", "") == "sinkhorn"  # its choice is not that of the largest scores
    return kind.endswith("Router") and callable(getattr(module, "routing", None)) and not sinkhorn


def own_choice(chosen: Any, logits: torch.Tensor, where: Coordinates) -> torch.Tensor | None:
    """What was chosen for the tokens of `logits`, one row per token; None if it cannot be told here.

    Megatron before 0.9 gathers the choices of the tensor parallel ranks. MindSpeed's router may return such a gather
    while it is still under way, with its handle: that is not waited for.
    """
    if not isinstance(chosen, torch.Tensor) or chosen.dim() == 0:
        return None
    tokens = logits.numel() // logits.shape[-1]
    rows = chosen.detach().reshape(-1, chosen.shape[-1])
    if len(rows) == tokens:
        return rows
    for parts, part in (
        (where.tp_size, where.tp),
        (where.ep_size * where.etp_size, where.ep * where.etp_size + where.etp),
    ):
        if len(rows) == tokens * parts:
            return rows[part * tokens : (part + 1) * tokens]
    return None


def ranking_of(module: nn.Module, dtype: torch.dtype) -> Ranking:
    """How a router ranks experts, from its settings."""
    config = getattr(module, "config", None)

    def setting(name: str) -> Any:
        return getattr(config, name, None)

    function = str(getattr(module, "score_function", None) or setting("moe_router_score_function") or "softmax")
    if function == "softmax":
        function = "softmax" if setting("moe_router_pre_softmax") else "logits"
    weight = getattr(module, "weight", None)
    own = weight.dtype if isinstance(weight, torch.Tensor) and weight.is_floating_point() else dtype
    bias = getattr(module, "expert_bias", None)
    return Ranking(
        function=function,
        bias=bias.detach() if isinstance(bias, torch.Tensor) else None,
        groups=int(setting("moe_router_num_groups") or 0),
        chosen_groups=int(setting("moe_router_group_topk") or 0),
        topk=int(getattr(module, "topk", None) or 1),
        rounding=min(1.0, torch.finfo(dtype).eps / torch.finfo(own).eps),
    )
