"""The same call at higher precision, or on the host: its arguments changed, nothing else.

A result of 16 bits has its twin in 32 where all of it is computed (fix, `profile: msprobe`), and everything has it in
64 where a few rows are. A module's twin is given its parameters converted; with `twin: sibling` it is the code of the
same module in another layer, run with this one's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

_NESTING = 4
Change = Callable[[torch.Tensor], torch.Tensor]


def convert(value: Any, change: Change, depth: int = 0) -> Any:  # noqa: PLR0911 (one for each container)
    """Containers of the same shape with every tensor changed.

    Example::

        convert([x, {"a": y}], torch.Tensor.double)
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if depth == _NESTING:
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(convert(item, change, depth + 1) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(convert(item, change, depth + 1) for item in value)
    if isinstance(value, dict):
        return {key: convert(item, change, depth + 1) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = {
            item.name: convert(getattr(value, item.name), change, depth + 1) for item in fields(value) if item.init
        }
        return replace(value, **changed)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in arguments, in the order in which `convert` meets them.

    Example::

        tensors_of(((x, 2), {"weight": w}))      # [x, w]
    """
    found: list[torch.Tensor] = []
    convert(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def higher(dtype: torch.dtype) -> torch.dtype:
    """The next precision above a floating type; 64 bits have none."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def raised(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the next precision, differentiably."""
    return x.to(higher(x.dtype)) if x.is_floating_point() and x.dtype is not torch.float64 else x


def single(x: torch.Tensor) -> torch.Tensor:
    """16 bits in 32, as msprobe does; other tensors as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def double(x: torch.Tensor) -> torch.Tensor:
    """A floating tensor in 64 bits."""
    return x.double() if x.is_floating_point() else x


def on_host(x: torch.Tensor) -> torch.Tensor:
    """A tensor in host memory, 16 bits in 32."""
    return single(x.to("cpu"))


def has_lower(value: Any) -> bool:
    """Whether any tensor of the arguments has 16 bits.

    Example::

        has_lower((torch.ones(1, dtype=torch.bfloat16),))      # True
    """
    return any(x.dtype in (torch.float16, torch.bfloat16) for x in tensors_of(value))


def dtypes_asked(args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> tuple[tuple[Any, ...], Any]:
    """Arguments changed, and where a call names a dtype for its result (`softmax(x, dtype=…)`), that one too."""

    def other(value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return change(torch.empty(0, dtype=value)).dtype
        return value

    changed, keywords = convert(args, change), convert(kwargs, change)
    return tuple(map(other, changed)), {key: other(value) for key, value in keywords.items()}


def module_twin(module: nn.Module, change: Change) -> Callable[..., Any]:
    """A function that runs a module with its parameters and buffers changed.

    Example::

        exact = module_twin(norm, double)(x.double())
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def run(*args: Any, **kwargs: Any) -> Any:
        return functional_call(module, {key: change(value) for key, value in state.items()}, args, kwargs)

    return run


def sibling_twin(module: nn.Module, sibling: nn.Module) -> Callable[..., Any]:
    """A function that runs the code of `sibling` with the parameters of `module`.

    Example::

        repaired = sibling_twin(layers[2].mlp, layers[1].mlp)(x)
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        # Taken anew at each call: an optimizer may have put other tensors in their place.
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return functional_call(sibling, state, args, kwargs)

    return run


def find_sibling(name: str, modules: dict[str, nn.Module], layer: int | None) -> str | None:
    """Name of the module that stands at the same place in another layer, of the same class; nearest layer first.

    Example::

        find_sibling("decoder.layers.2.mlp", modules, 2)      # 'decoder.layers.1.mlp'
    """
    if layer is None:
        return None
    head, _, tail = name.partition(f"layers.{layer}")
    others: Sequence[int] = sorted(range(10_000), key=lambda n: (abs(n - layer), n))[1:200]
    for other in others:
        candidate = f"{head}layers.{other}{tail}"
        if candidate in modules and type(modules[candidate]) is type(modules[name]):
            return candidate
    return None
