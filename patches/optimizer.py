"""The outermost optimizer: where a step ends.

Patched on the instance, not the class: since megatron-core 0.12 the optimizer is always a chain whose children's
`step` is never called, and a job may hold several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from msprobe_megatron.job.patching.attributes import add_wrapper, remove_wrapper


def wrap_step(optimizer: Any, session: Any) -> Callable[[], None]:
    """Notify `session` before and after every `optimizer.step()`; returns a function that undoes it."""
    if isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return _hook_step(optimizer, session)

    def notifying(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            session.optimizer_begin()
            result = None
            try:
                result = original(*args, **kwargs)
            finally:
                session.optimizer_end(result)
            return result

        return step

    add_wrapper(optimizer, "step", notifying)
    return lambda: remove_wrapper(optimizer, "step", notifying)


def _hook_step(optimizer: torch.optim.Optimizer, session: Any) -> Callable[[], None]:
    """Use the hooks of torch's own optimizers: torch's schedulers reject a `step` that is no bound method."""

    def before(*args: Any) -> None:
        session.optimizer_begin()

    def after(*args: Any) -> None:
        session.optimizer_end()

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
