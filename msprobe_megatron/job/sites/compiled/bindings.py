"""The hooks of modules and of gradients, compiled: the same as in `modules` and `arriving`, at a third of the cost.

They are there where the compiled look is. A hook does a call whole or leaves it whole to the one in Python, which it is
made with: so each exists once more there, and where there is no compiler nothing else changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, Protocol

import torch
from torch import nn

from msprobe_megatron import native
from msprobe_megatron.clock import Clock
from msprobe_megatron.sites.arguments import NO_TENSORS
from msprobe_megatron.sites.arriving import See, await_gradient
from msprobe_megatron.topology.places import Place


class Watch(Protocol):
    """What the hooks of a site share: whether they do anything, for which step, and who is told."""

    active: bool
    traced: bool
    round: int
    see: Callable[[Any, torch.Tensor, int | None, str], None]
    see_gradient: See


def new_watch(
    clock: Clock,
    see: Callable[[Any, torch.Tensor, int | None, str], None],
    fault: Callable[[BaseException, str], None],
    gradient_fault: Callable[[BaseException, Place], None],
    stacks: bool,
    sides: tuple[bool, bool, bool, bool],
) -> Watch | None:
    """What hooks are made with; None where there are no compiled ones.

    `sides`: whether inputs and outputs of the forward, and of the backward, are told to `see`. With `stacks` the first
    call of every module is left to Python.

    Example::

        watch = new_watch(clock, probe.see, fault, gradient_fault, True, (True, True, True, True))
    """
    module = native.look()
    if module is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        sample = torch.empty(0, device="cpu")
    kinds = (torch.Tensor, nn.Parameter, sample)
    made: Watch = module.Watch(
        clock, see, fault, gradient_fault, may_hold_tensors, await_gradient, *kinds, stacks, *sides
    )
    return made


def new_hook(
    watch: Watch,
    watched: Any,
    slow: Callable[..., None],
    parameters: tuple[str, ...],
    make: Callable[[str], tuple[Any, ...]],
    what: str,
    *,
    after: bool,
) -> Callable[..., None]:
    """A hook before or after the forward of a module.

    `watched` has the numbers of calls (`calls`, `current`), `make(path)` gives the places of a tensor, `what` is said
    when there is a fault.

    Example::

        hook = new_hook(watch, watched, before, ("hidden_states",), make, "input of decoder", after=False)
    """
    made: Callable[..., None] = native.look().Hook(watch, watched, slow, parameters, make, what, after)  # type: ignore[union-attr]
    return made


def backward_is_traced() -> bool:
    """Whether torch compiles the backward: it then refuses hooks that are not of Python.

    Example: ``watch.traced = backward_is_traced()``.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    asked = getattr(getattr(dynamo, "config", None), "compiled_autograd", False)
    return bool(asked or getattr(getattr(dynamo, "compiled_autograd", None), "compiled_autograd_enabled", False))


def may_hold_tensors(kind: type) -> bool:
    """Whether a value of this type can be or hold a tensor that `find_tensors` finds.

    Example: ``may_hold_tensors(dict)``.
    """
    if kind in NO_TENSORS:
        return False
    return issubclass(kind, torch.Tensor | tuple | list | dict) or is_dataclass(kind)
