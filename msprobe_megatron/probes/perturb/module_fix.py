"""Fix of whole modules: their forward replaced, on the instance, by a twin; their gradients are the twin's.

The twin is the module itself in the next precision or on the host, or the code of the same module in another layer with
this one's parameters. Parameters stay the same objects, so that optimizer and data-parallel hooks see what they know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless

from msprobe_megatron.probes.perturb import twins
from msprobe_megatron.probes.perturb.fix import both
from msprobe_megatron.probes.perturb.rerun import hooks_off

_stateless: Any = stateless


class ModuleFix:
    """Replaces modules between `install` and `remove`.

    Example::

        fix = ModuleFix("improve_precision", "forward")
        fix.install("decoder.layers.2.mlp", mlp, None, lambda: True); ...; fix.remove()
    """

    def __init__(self, mode: str, stage: str) -> None:
        self._change = twins.on_host if mode == "to_cpu" else twins.raised
        self._stage = stage
        self._replaced: list[nn.Module] = []

    def install(self, name: str, module: nn.Module, sibling: nn.Module | None, wanted: Callable[[], bool]) -> None:
        """Replace the forward of a module; `wanted` is asked at each call."""
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not wanted():
                return original(*args, **kwargs)
            better = self._sibling(module, sibling, args, kwargs) if sibling is not None else None
            if sibling is None:
                better = self._better(module, original, args, kwargs)
            return both(better, original(*args, **kwargs)) if self._stage == "backward" else better

        module.forward = forward
        self._replaced.append(module)

    def remove(self) -> None:
        """Give every module its own forward back. Safe to call twice."""
        for module in self._replaced:
            module.__dict__.pop("forward", None)
        self._replaced.clear()

    def _better(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        low = _first((args, kwargs))
        with _with_state(module, {key: self._change(value) for key, value in _state(module).items()}):
            result = original(*twins.convert(args, self._change), **twins.convert(kwargs, self._change))
        if low is None:
            return result

        def back(x: torch.Tensor) -> torch.Tensor:
            return x.to(device=low.device, dtype=low.dtype if x.dtype is twins.higher(low.dtype) else x.dtype)

        return twins.convert(result, back)

    def _sibling(self, module: nn.Module, sibling: nn.Module, args: Any, kwargs: Any) -> Any:
        with hooks_off(sibling), _with_state(sibling, _state(module)):
            return type(sibling).forward(sibling, *args, **kwargs)


def _first(value: Any) -> torch.Tensor | None:
    found: list[torch.Tensor] = []
    twins.convert(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return next((x for x in found if x.is_floating_point()), None)


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@contextmanager
def _with_state(module: nn.Module, state: dict[str, torch.Tensor]) -> Iterator[None]:
    with _stateless._reparametrize_module(module, state):
        yield
