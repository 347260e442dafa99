"""Site: the tokens of forward-only passes: their ids, positions, and what log-prob the model gave each of them.

By these, samples and tokens of a trainer and of an engine are matched, whatever their batches. Logits are never saved
for it: a rank keeps the log-sum-exp of its part of the vocabulary and the logit of the token, from which
`msprobe-megatron logprobs` puts the log-prob together without communication in the job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.module.modules import parameter_names
from msprobe_megatron.job.sites.module.routing import Fault, RecordKeeper
from msprobe_megatron.topology import names
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.shards import Place, ShardSpec

_ARGUMENTS = {
    "input_ids": "input_ids",
    "tokens": "input_ids",
    "position_ids": "position_ids",
    "positions": "position_ids",
    "labels": "labels",
    "cu_seqlens": "cu_seqlens",
}
_AT_ONCE = 1 << 24
"""Logits in work at once, in float32."""


class TokenSite:
    """Records tokens and their log-probs at the model itself, between `install` and `remove`."""

    def __init__(
        self, chunks: Sequence[nn.Module], keeper: RecordKeeper, clock: Clock, where: Coordinates, fault: Fault
    ) -> None:
        self._keeper, self._clock, self._where, self._fault = keeper, clock, where, fault
        self._models = [names.unwrap(chunk) for chunk in chunks]
        self._handles: list[RemovableHandle] = []
        self._active = False
        self._places: dict[tuple[str, str, str, int], Place] = {}
        self._ids: torch.Tensor | None = None
        self._labelled = False

    def install(self) -> None:
        """Set the hooks. Idempotent."""
        self._active = True
        if self._handles:
            return
        for index, model in enumerate(self._models):
            known = parameter_names(model)
            self._handles += [
                model.register_forward_pre_hook(self._before(known, index), with_kwargs=True),
                model.register_forward_hook(self._after(model, index), with_kwargs=True),
            ]

    def pause(self) -> None:
        """Ignore what the model does."""
        self._active = False

    def resume(self) -> None:
        """Go on after `pause`."""
        self._active = bool(self._handles)

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        self._active, self._ids = False, None
        while self._handles:
            self._handles.pop().remove()

    def _before(self, known: tuple[str, ...], chunk: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._active or (self._clock.away and self._clock.apart()):
                return
            try:
                given = {**dict(zip(known, args, strict=False)), **kwargs}
                self._ids, self._labelled = None, isinstance(given.get("labels"), torch.Tensor)
                with untraced(), torch.no_grad():
                    for name, value in given.items():
                        if name in _ARGUMENTS and isinstance(value, torch.Tensor):
                            self._keep("input", _ARGUMENTS[name], value, chunk)
                            if _ARGUMENTS[name] == "input_ids":
                                self._ids = value
            except Exception as error:
                self._fault(error, "tokens of the model")

        return hook

    def _after(self, model: nn.Module, chunk: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not self._active or self._ids is None or (self._clock.away and self._clock.apart()):
                return
            try:
                with untraced(), torch.no_grad():
                    self._scored(model, output, self._ids, chunk)
            except Exception as error:
                self._fault(error, "log-probs of the model")

        return hook

    def _scored(self, model: nn.Module, output: Any, ids: torch.Tensor, chunk: int) -> None:
        logits = logits_of(output)
        if logits is None or not logits.is_floating_point():
            return
        kind = str(logits.dtype).removeprefix("torch.")
        if self._labelled and logits.shape == ids.shape:
            # Megatron with labels returns the loss of every token.
            self._keep("output", "loss", logits.detach().float(), chunk, kind)
        elif logits.shape[:-1] == ids.shape and ids.shape[-1] > 1 and self._where.cp_size == 1:
            split = self._where.tp_size > 1 and bool(getattr(model, "parallel_output", False))
            first = self._where.tp * logits.shape[-1] if split else 0
            self._keep("output", "split" if split else "whole", token_scores(logits.detach(), ids, first), chunk, kind)

    def _keep(self, io: str, path: str, tensor: torch.Tensor, chunk: int, dtype: str = "") -> None:
        key = (io, path, dtype, chunk)
        place = self._places.get(key)
        if place is None:
            extra = json.dumps({"logits": dtype}) if dtype else None
            spec = ShardSpec.unmergeable("tokens of one pass")
            place = Place("token", names.ROOT, io, path, "tokens", chunk, -1, lambda shape: spec, _one, extra=extra)
            self._places[key] = place
        self._keeper.keep(place, tensor.detach(), self._clock.moment.microbatch, "forward")


def logits_of(output: Any) -> torch.Tensor | None:
    """The logits, or losses, in what a model returned."""
    if isinstance(output, torch.Tensor):
        return output
    found = output.get("logits") if hasattr(output, "get") else None
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    return found if isinstance(found, torch.Tensor) else None


def token_scores(logits: torch.Tensor, ids: torch.Tensor, first: int) -> torch.Tensor:
    """For each position the log-sum-exp over these logits and the logit of the next token, -inf if not among them.

    `first` is the number of the first logit in the whole vocabulary. The last position has no next token: NaN.

    Example::

        >>> token_scores(torch.zeros(1, 2, 4), torch.tensor([[1, 3]]), 0)[0, 0].tolist()
        [1.3862943649291992, 0.0]
    """
    targets = torch.roll(ids, -1, -1) - first
    inside = (targets >= 0) & (targets < logits.shape[-1])
    index = targets.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
    found = torch.where(inside, logits.gather(-1, index).squeeze(-1).float(), float("-inf"))
    rows = logits.reshape(-1, logits.shape[-1])
    step = max(1, _AT_ONCE // logits.shape[-1])
    sums = [torch.logsumexp(rows[at : at + step].float(), -1) for at in range(0, len(rows), step)]
    scores = torch.stack((torch.cat(sums).reshape(ids.shape), found), -1)
    scores[..., -1, :] = float("nan")
    return scores


def _one(axis: str) -> int:
    return 1
