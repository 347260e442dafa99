"""Tensors inside the arguments and results of a call, with their paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

_NESTING = 4
NO_TENSORS = frozenset({type(None), str, int, float, bool, nn.Parameter, torch.dtype, torch.device, torch.Size})
"""Types of values that are not looked into."""
Found = list[tuple[str, torch.Tensor]]
own_work = torch._C.DisableTorchFunction
"""A context in which what the kit does with tensors is not taken for a call of the training code."""


def find_tensors(value: Any, path: str, found: Found, depth: int = 0, parameters: bool = False) -> None:
    """Add tensors inside nested containers to ``found``; parameters, which have rows of their own, only if asked for.

    Example::

        found = []
        find_tensors({"a": [x]}, "", found)     # found == [("a.0", x)]
    """
    kind = type(value)
    if kind is torch.Tensor:
        found.append((path, value))
    elif kind in NO_TENSORS or depth == _NESTING:
        if parameters and kind is nn.Parameter:
            found.append((path, value))
    elif isinstance(value, torch.Tensor):
        if parameters or not isinstance(value, nn.Parameter):
            found.append((path, value))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            find_tensors(item, f"{path}.{index}" if path else str(index), found, depth + 1, parameters)
    elif isinstance(value, dict):
        for key, item in value.items():
            find_tensors(item, f"{path}.{key}" if path else str(key), found, depth + 1, parameters)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            inner = f"{path}.{item.name}" if path else item.name
            find_tensors(getattr(value, item.name), inner, found, depth + 1, parameters)


def named_arguments(parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """Tensors of a call; a positional argument has the name of its parameter, or else its number."""
    found: Found = []
    # Most values are a tensor or nothing: those without a call.
    for index, value in enumerate(args):
        if value is not None:
            name = parameters[index] if index < len(parameters) else str(index)
            if value.__class__ is torch.Tensor:
                found.append((name, value))
            else:
                find_tensors(value, name, found)
    for name, value in kwargs.items():
        if value.__class__ is torch.Tensor:
            found.append((name, value))
        elif value is not None:
            find_tensors(value, name, found)
    return found


def results(output: Any) -> Found:
    """Tensors of what a call has returned.

    Example::

        results((x, None, {"a": y}))        # [("0", x), ("2.a", y)]
    """
    if output.__class__ is torch.Tensor:
        return [("", output)]
    found: Found = []
    if output.__class__ is tuple:
        # Mostly a tensor and no bias: without a call.
        for index, value in enumerate(output):
            if value.__class__ is torch.Tensor:
                found.append((str(index), value))
            elif value is not None:
                find_tensors(value, str(index), found, 1)
    else:
        find_tensors(output, "", found)
    return found


def with_other_tensors(
    value: Any, path: str, other: Callable[[str, torch.Tensor], torch.Tensor], depth: int = 0
) -> Any:
    """The value with each tensor inside of it, under the path that `find_tensors` gives it, replaced by another.

    A container in which nothing is replaced stays itself.

    Example::

        with_other_tensors((x, {"a": y}), "pair", lambda path, tensor: 2 * tensor)     # "pair.0", "pair.1.a"
    """
    if isinstance(value, torch.Tensor):
        return other(path, value)
    if depth == _NESTING:
        return value
    if isinstance(value, dict):
        items = {key: with_other_tensors(item, f"{path}.{key}", other, depth + 1) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in value) else value
    if isinstance(value, tuple | list):
        parts = [with_other_tensors(item, f"{path}.{i}", other, depth + 1) for i, item in enumerate(value)]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
