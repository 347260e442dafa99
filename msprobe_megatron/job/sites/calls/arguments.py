"""Tensors inside the arguments and results of a call, with their paths."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

_NESTING = 4
_PACKAGE = Path(__file__).parents[3].as_posix()
NO_TENSORS = frozenset({type(None), str, int, float, bool, nn.Parameter, torch.dtype, torch.device, torch.Size})
"""Types of values that cannot hold a tensor, or are never reported."""
Found = list[tuple[str, torch.Tensor]]
untraced = torch._C.DisableTorchFunction
"""Context in which the kit's own work on tensors is not seen as calls of the training code."""


GENERATOR_STATE = 5056
"""Bytes of the state of the host's generator, in every release of torch; those of devices have other sizes."""
_KEEPERS = "random.py"
"""The file of torch, torch.cuda, torch_npu and Megatron that handles states; no model computes there."""
_BETWEEN = ("torch/_tensor.py", "torch/overrides.py")
_MOST_FRAMES = 8


def is_generator_state(tensor: torch.Tensor) -> bool:
    """Tell a state of a generator, or the comparison of two, from what a model computes.

    Megatron compares them around every region with a random state of its own, and torch copies those of a device when
    they are set: bookkeeping that differs between a run on CPU and one on a device. States are bytes in host memory,
    of the size of the host's, or in the hands of the code that keeps them.
    """
    kind = tensor.dtype
    if not (kind is torch.uint8 or kind is torch.bool) or not tensor.is_cpu or tensor.dim() > 1:
        return False
    return (tensor.dim() == 1 and tensor.numel() == GENERATOR_STATE) or _called_by_keeper()


def _called_by_keeper() -> bool:
    """Whether the call of torch that is being reported comes from a file that handles states of generators."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        file = frame.f_code.co_filename.replace("\\", "/")
        if not file.startswith(_PACKAGE) and not file.endswith(_BETWEEN):
            return file.rpartition("/")[2] == _KEEPERS
        frame = frame.f_back
    return False


def find_tensors(value: Any, path: str, found: Found, depth: int = 0, parameters: bool = False) -> None:
    """Append tensors inside nested containers to ``found``; parameters, which have rows of their own, on request."""
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


# Operators that scale their first argument by `beta`: with 0 they do not read it, so it may be uninitialized memory.
_SCALED_BY_BETA = frozenset({"baddbmm", "addmm", "addbmm", "addmv", "addr", "sspaddmm"})
# Methods that overwrite the whole of their own tensor.
_OVERWRITING = frozenset(
    """
    copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_
    """.split()  # noqa: SIM905
)


def may_leave_unread(api: str) -> bool:
    """Whether calls of this name can have an unread argument besides an `out=` buffer."""
    short = api.rpartition(".")[2]
    return api.startswith("torch.") and (short in _OVERWRITING or short.rstrip("_") in _SCALED_BY_BETA)


def unread_arguments(api: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments whose values the operator does not read, with their paths: they mean nothing and get no statistics.

    Example::

        >>> memory, a, b = torch.empty(1, 2, 2), torch.ones(1, 2, 2), torch.ones(1, 2, 2)
        >>> [path for path, _ in unread_arguments("torch.baddbmm", (memory, a, b), {"beta": 0})]
        ['0']
    """
    found = []
    if may_leave_unread(api) and (api.rpartition(".")[2] in _OVERWRITING or _is_zero(kwargs.get("beta", 1))):
        if args:
            found.append(("0", args[0]))
        elif "input" in kwargs:
            found.append(("input", kwargs["input"]))
    if "out" in kwargs and api.startswith("torch."):
        found.append(("out", kwargs["out"]))
    return found


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


_SCALARS = frozenset({int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device, slice})
_PATHS = tuple(map(str, range(16)))
"""Paths of positional arguments; a call with more of them is rare."""


def numbered_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """Tensors and parameters in the arguments of a call; a positional argument is named by its index."""
    found: Found = []
    for path, value in zip(_PATHS, args, strict=False):
        kind = value.__class__
        if kind is torch.Tensor or kind is nn.Parameter:
            found.append((path, value))
        elif kind not in _SCALARS:
            find_tensors(value, path, found, parameters=True)
    if kwargs or len(args) > len(_PATHS):
        for index, value in enumerate(args[len(_PATHS) :], len(_PATHS)):
            find_tensors(value, str(index), found, parameters=True)
        for name, value in kwargs.items():
            if value.__class__ not in _SCALARS:
                find_tensors(value, name, found, parameters=True)
    return found


def named_arguments(parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """Tensors in the arguments of a call; a positional argument gets the name of its parameter, or its index."""
    found: Found = []
    # Most values are a tensor or None: these need no call.
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


def results(output: Any, parameters: bool = False) -> Found:
    """Tensors in the result of a module; on request also parameters in a tuple: biases left to the caller."""
    if output.__class__ is torch.Tensor:
        return [("", output)]
    found: Found = []
    if output.__class__ is tuple:
        # Mostly a tensor and no bias: these need no call.
        for index, value in enumerate(output):
            kind = value.__class__
            if kind is torch.Tensor or (parameters and kind is nn.Parameter):
                found.append((str(index), value))
            elif value is not None:
                find_tensors(value, str(index), found, 1)
    else:
        find_tensors(output, "", found)
    return found


def with_other_tensors(
    value: Any, path: str, other: Callable[[str, torch.Tensor], torch.Tensor], depth: int = 0
) -> Any:
    """The value with each tensor inside replaced by ``other(path, tensor)``, paths as in `find_tensors`.

    A container in which nothing is replaced is returned as it is.
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
