"""Where a step begins in a loop that has no Megatron schedule: at the first forward of the attached model.

One wrapper around the call of the model itself, for as long as it is attached. It comes before the model's hooks, so
that those of the first forward see its arguments too. Forwards without gradients (evaluation) are not of a step.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from msprobe_megatron.clock import Clock, inside_backward
from msprobe_megatron.topology import names


class Steps(Protocol):
    """Who is told that the attached model runs."""

    clock: Clock

    def forward_begin(self, model: nn.Module) -> None:
        """The model is called to be trained."""

    def aside(self) -> AbstractContextManager[None]:
        """While the model is called for something else than training."""


def watch_forwards(chunks: Iterable[nn.Module], steps: Steps) -> Callable[[], None]:
    """Tell `steps` of every call of these models; returns the way back.

    Example::

        stop = watch_forwards([model], session)
        ...
        stop()
    """
    undo = [_watch(names.unwrap(chunk), steps) for chunk in chunks]

    def stop() -> None:
        for one in undo:
            one()

    return stop


def _watch(model: nn.Module, steps: Steps) -> Callable[[], None]:
    # Named and bound as the method it hides: a copy or a pickle of the model then calls itself, unwatched.
    def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is model and not inside_backward():
            if not torch.is_grad_enabled():
                # What another thread evaluates must not stop what is seen of the step, which goes on meanwhile.
                with steps.clock.elsewhere() or steps.aside():
                    return type(self)._call_impl(self, *args, **kwargs)  # type: ignore[no-untyped-call]
            steps.forward_begin(self)
        return type(self)._call_impl(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    bound = types.MethodType(_call_impl, model)
    object.__setattr__(model, "_call_impl", bound)

    def undo() -> None:
        if vars(model).get("_call_impl") is bound:
            object.__delattr__(model, "_call_impl")

    return undo
