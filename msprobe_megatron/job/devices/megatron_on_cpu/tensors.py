"""Tensors requested on "cuda" are made, moved and named on the CPU. The wrappers sit on torch's hottest
functions: they look at the keyword arguments they were given and at nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from msprobe_megatron.job.devices.megatron_on_cpu.substitute import CPU, names_cuda, substitute

# fmt: off
FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "scalar_tensor",
    "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_LEGACY_TYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
# fmt: on


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Redirect `device=` and drop `pin_memory=` (which needs an accelerator)."""

    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and names_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        if "pin_memory" in kwargs:
            del kwargs["pin_memory"]
        return function(*args, **kwargs)

    return factory


def _to_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and names_cuda(args[0]):
            args = (CPU, *args[1:])
        elif "device" in kwargs and names_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        return function(self, *args, **kwargs)

    return to


def _type_as_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """`t.type()` answers "torch.cuda.FloatTensor": Megatron's optimizers sort parameters by that string."""

    @functools.wraps(function)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return "torch.cuda." + function(self).removeprefix("torch.").removeprefix("cuda.")
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return function(self, dtype, *args, **kwargs)

    return type_


def histc_of_integers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count integers too, as devices do: token dispatchers count tokens an expert with it."""

    @functools.wraps(function)
    def histc(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.is_floating_point():
            return function(input, *args, **kwargs)
        return function(input.double(), *args, **kwargs).to(input.dtype)

    return histc


def _itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def install() -> None:
    """Wrap factories, moves and type names. Module.cuda goes through Tensor.cuda."""
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    for name in _METHODS:
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    tensor.to = _to_on_cpu(tensor.to)
    module: Any = torch.nn.Module
    module.to = _to_on_cpu(module.to)
    tensor.type = _type_as_cuda(tensor.type)
    substitute((torch,), "histc", histc_of_integers(torch.histc))
    substitute((tensor,), "cuda", _itself)
    substitute((tensor,), "pin_memory", _itself)
    for name in _LEGACY_TYPES:
        setattr(torch.cuda, name + "Tensor", getattr(torch, name + "Tensor"))
