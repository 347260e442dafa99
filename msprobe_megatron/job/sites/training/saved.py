"""Site: variables that the training code passes to `save` by name, and their gradients (level debug).

Needs no hooks on the model; the gradient comes from a hook on the tensor, as for modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from msprobe_megatron.job.clock import Clock, Moment
from msprobe_megatron.job.sites.calls.arguments import Found, find_tensors, untraced
from msprobe_megatron.job.sites.sink import Sink
from msprobe_megatron.topology.shards import Place, ShardSpec

_LAYOUT = ShardSpec.unmergeable("saved by hand")
_NUMBERS = (bool, int, float)
_NESTING = 8
Fault = Callable[[BaseException, str], None]


class SavedSite:
    """Takes variables between `install` and `remove`.

    The n-th `save` of a name within a pass (phase and microbatch) is called ``debug/NAME.n``.
    """

    def __init__(self, sink: Sink, clock: Clock, fault: Fault) -> None:
        self._sink, self._clock, self._fault = sink, clock, fault
        self._forward, self._backward = (sink.wants_io(direction, "output") for direction in ("forward", "backward"))
        self._numbers: dict[tuple[str, str, Moment], int] = {}
        self._places: dict[tuple[str, str, str], Place] = {}
        self._round = 0
        self._active = False
        self.fired = 0

    def install(self) -> None:
        """Start to take variables; their numbers restart at 0."""
        self._round += 1
        self._numbers.clear()
        self._active = True

    def remove(self) -> None:
        """Take no more; gradients that still arrive are ignored. Safe to call twice."""
        self._active = False

    def save(self, variable: Any, name: str, gradient: bool) -> None:
        """Report the tensors and numbers in a variable, and later the gradients of the tensors."""
        if not self._active:
            return
        with untraced():
            phase, moment = self._clock.passing()
            key = (name, phase, moment)
            number = self._numbers.get(key, 0)
            self._numbers[key] = number + 1
            full = f"debug/{name}.{number}"
            if not self._sink.wants(full):
                return
            self.fired += 1
            found: Found = []
            _collect(variable, "", found)
            for path, tensor in found:
                if self._forward:
                    self._sink.see(self._place("activation", full, path), tensor, moment.microbatch, phase)
                if gradient and self._backward and tensor.requires_grad:
                    hook = self._gradient(self._place("gradient", full, path), moment)
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _place(self, kind: str, name: str, path: str) -> Place:
        key = (kind, name, path)
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = Place(kind, name, "output", path, "save", 0, -1, _layout, _one)
        return found

    def _gradient(self, place: Place, moment: Moment) -> Callable[[torch.Tensor], None]:
        this_round = self._round

        def hook(gradient: torch.Tensor) -> None:
            if not self._active or self._round != this_round:
                return
            try:
                with untraced():
                    self._sink.see(place, gradient, moment.microbatch, "backward")
            except Exception as error:
                self._fault(error, f"gradient of {place.name}")

        return hook


def _collect(value: Any, path: str, found: Found, depth: int = 0) -> None:
    """Tensors (parameters too) and numbers (as tensors of one element) with their paths; strings are skipped."""
    if isinstance(value, torch.Tensor):
        found.append((path, value))
    elif isinstance(value, _NUMBERS):
        found.append((path, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)))
    elif depth == _NESTING:
        return
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _collect(item, f"{path}.{key}" if path else str(key), found, depth + 1)
    else:
        find_tensors(value, path, found, depth)


def _layout(shape: tuple[int, ...]) -> ShardSpec:
    return _LAYOUT


def _one(axis: str) -> int:
    return 1
