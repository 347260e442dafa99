"""Fix: the operator replaced by its twin, forward and backward.

The twin's own graph is what backward runs, so that the gradient belongs to the value. With `stage: backward` the live
value stays and only its gradient is the twin's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from msprobe_megatron.probes.perturb import twins


class _Swapped(torch.autograd.Function):
    """Gives the live value and hands its gradient to the twin."""

    @staticmethod
    def forward(ctx: Any, twin: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        return live.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


_swapped: Any = _Swapped.apply


def fixed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mode: str, stage: str) -> Any:
    """The result of a call by its twin, in the dtype and on the device that the call itself would have given.

    Example::

        fixed(torch.softmax, (x, -1), {}, "improve_precision", "forward")
    """
    return replaced(function, function, args, kwargs, mode, stage)


def replaced(
    original: Callable[..., Any],
    twin: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: str,
    stage: str,
) -> Any:
    """Like `fixed`, with another function as the twin (a module with converted parameters, a sibling's code)."""
    change = twins.on_host if mode == "to_cpu" else twins.raised
    dtypes = _dtypes(original, args, kwargs)
    device = next((x.device for x in _tensors((args, kwargs))), None)
    better = twin(*twins.convert(args, change), **twins.convert(kwargs, change))
    if stage == "backward":
        return both(better, original(*args, **kwargs))
    wanted = iter(dtypes)

    def back(x: torch.Tensor) -> torch.Tensor:
        return x.to(device=device, dtype=next(wanted, x.dtype))

    return twins.convert(better, back)


def _dtypes(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.dtype, ...]:
    """Dtypes that the original call gives; learned from one call of each kind, whose result is thrown away."""
    named = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype))
    key = (original, tuple(x.dtype for x in _tensors((args, kwargs))), named)
    if key not in _LEARNED:
        if len(_LEARNED) >= _MOST:
            _LEARNED.clear()
        with torch.no_grad():
            _LEARNED[key] = tuple(x.dtype for x in _tensors(original(*args, **kwargs)))
    return _LEARNED[key]


_LEARNED: dict[Any, tuple[torch.dtype, ...]] = {}
_MOST = 4096


def both(better: Any, live: Any) -> Any:
    """The live values with the gradients of the better ones.

    Example::

        y = both(softmax(x.float()), softmax(x))
    """
    if isinstance(live, torch.Tensor):
        if not (live.is_floating_point() and isinstance(better, torch.Tensor) and better.requires_grad):
            return live
        return _swapped(better.to(live.dtype).to(live.device), live)
    if isinstance(live, list | tuple):
        return type(live)(both(a, b) for a, b in zip(better, live, strict=True))
    return live


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    twins.convert(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found
