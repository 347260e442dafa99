"""Fix: an operator or module replaced by its high-precision twin, forward and backward.

The twin is the same call in the next precision or on the host; of a module also the code of the same module in another
layer with this one's parameters. The twin's own graph is what backward runs, so the gradient belongs to the value. With
`stage: backward` the live value stays and only its gradient is the twin's. Modules keep their parameters, so optimizer
and data-parallel hooks are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless

from msprobe_megatron.job.features.perturb.run.changed_inputs import (
    Change,
    convert,
    higher,
    on_host,
    raised,
    tensors_of,
)
from msprobe_megatron.job.features.perturb.run.rerun import hooks_off

_stateless: Any = stateless
_DTYPES: dict[Any, tuple[torch.dtype, ...]] = {}
_MOST = 4096


def change_of(mode: str) -> Change:
    """How tensors are converted for the twin of this mode."""
    return on_host if mode == "to_cpu" else raised


class _Swapped(torch.autograd.Function):
    """Returns the live value and passes its gradient to the twin."""

    @staticmethod
    def forward(ctx: Any, twin: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        return live.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


_swapped: Any = _Swapped.apply


def fixed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mode: str, stage: str) -> Any:
    """The result of a call's twin, in the dtype and on the device of the call's own result."""
    change = change_of(mode)
    dtypes = _dtypes(function, args, kwargs)
    device = next((x.device for x in tensors_of((args, kwargs))), None)
    better = function(*convert(args, change), **convert(kwargs, change))
    if stage == "backward":
        return both(better, function(*args, **kwargs))
    wanted = iter(dtypes)

    def back(x: torch.Tensor) -> torch.Tensor:
        return x.to(device=device, dtype=next(wanted, x.dtype))

    return convert(better, back)


def _dtypes(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.dtype, ...]:
    """Dtypes of the results of the original call; found by one call of each kind, whose result is discarded."""
    named = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype))
    key = (original, tuple(x.dtype for x in tensors_of((args, kwargs))), named)
    if key not in _DTYPES:
        if len(_DTYPES) >= _MOST:
            _DTYPES.clear()
        with torch.no_grad():
            _DTYPES[key] = tuple(x.dtype for x in tensors_of(original(*args, **kwargs)))
    return _DTYPES[key]


def both(better: Any, live: Any) -> Any:
    """The live values with the gradients of the twin's."""
    if isinstance(live, torch.Tensor):
        if not (live.is_floating_point() and isinstance(better, torch.Tensor) and better.requires_grad):
            return live
        return _swapped(better.to(live.dtype).to(live.device), live)
    if isinstance(live, list | tuple):
        return type(live)(both(a, b) for a, b in zip(better, live, strict=True))
    return live


class ModuleFix:
    """Replaces modules between `install` and `remove`."""

    def __init__(self, mode: str, stage: str) -> None:
        self._change = change_of(mode)
        self._stage = stage
        self._replaced: list[tuple[nn.Module, Any]] = []
        """Modules, and the forward that somebody had set on the instance before; None: that of the class."""

    def install(self, name: str, module: nn.Module, sibling: nn.Module | None, wanted: Callable[[], bool]) -> None:
        """Replace the forward of a module; it is used in the calls for which `wanted()` is true."""
        original, own = module.forward, vars(module).get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not wanted():
                return original(*args, **kwargs)
            better = self._sibling(module, sibling, args, kwargs) if sibling is not None else None
            if sibling is None:
                better = self._better(module, original, args, kwargs)
            return both(better, original(*args, **kwargs)) if self._stage == "backward" else better

        module.forward = forward
        self._replaced.append((module, own))

    def remove(self) -> None:
        """Restore the forward of every module. Safe to call twice."""
        for module, own in self._replaced:
            module.__dict__.pop("forward", None)
            if own is not None:
                module.forward = own
        self._replaced.clear()

    def _better(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        low = _first((args, kwargs))
        with _with_state(module, {key: self._change(value) for key, value in _state(module).items()}):
            result = original(*convert(args, self._change), **convert(kwargs, self._change))
        if low is None:
            return result

        def back(x: torch.Tensor) -> torch.Tensor:
            return x.to(device=low.device, dtype=low.dtype if x.dtype is higher(low.dtype) else x.dtype)

        return convert(result, back)

    def _sibling(self, module: nn.Module, sibling: nn.Module, args: Any, kwargs: Any) -> Any:
        with hooks_off(sibling), _with_state(sibling, _state(module)):
            return type(sibling).forward(sibling, *args, **kwargs)


def _first(value: Any) -> torch.Tensor | None:
    return next((x for x in tensors_of(value) if x.is_floating_point()), None)


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@contextmanager
def _with_state(module: nn.Module, state: dict[str, torch.Tensor]) -> Iterator[None]:
    with _stateless._reparametrize_module(module, state):
        yield
