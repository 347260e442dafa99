"""The outermost optimizer: where a step ends.

Patched on the instance, not the class: since megatron-core 0.12 the optimizer is always a chain whose children's
`step` is never called, and a job may hold several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from msprobe_megatron.patching import Patch

PATCHES: list[Patch] = []


def wrap_step(optimizer: Any, session: Any) -> Callable[[], None]:
    """Tell `session` of the beginning and the end of every `optimizer.step()`; returns the way back.

    Example::

        undo = wrap_step(optimizer, session)
        ...
        undo()
    """
    if isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return _hook_step(optimizer, session)
    own = "step" in vars(optimizer)
    original = optimizer.step

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        session.optimizer_begin()
        result = None
        try:
            result = original(*args, **kwargs)
        finally:
            session.optimizer_end(result)
        return result

    optimizer.step = step

    def undo() -> None:
        if vars(optimizer).get("step") is not step:
            return
        if own:
            optimizer.step = original
        else:
            del optimizer.step

    return undo


def _hook_step(optimizer: torch.optim.Optimizer, session: Any) -> Callable[[], None]:
    """Use the hooks of torch's own optimizers: schedulers of torch refuse a `step` that is no bound method."""

    def before(*args: Any) -> None:
        session.optimizer_begin()

    def after(*args: Any) -> None:
        session.optimizer_end()

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
