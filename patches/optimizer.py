"""The outermost optimizer: where a step ends.

Patched on the instance, not the class: since megatron-core 0.12 the optimizer is always a chain whose children's
`step` is never called, and a job may hold several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from msprobe_megatron.patching import Patch

PATCHES: list[Patch] = []


def wrap_step(optimizer: Any, session: Any) -> Callable[[], None]:
    """Tell `session` of the beginning and the end of every `optimizer.step()`; returns the way back.

    Example::

        undo = wrap_step(optimizer, session)
        ...
        undo()
    """
    own = "step" in vars(optimizer)
    original = optimizer.step

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        session.optimizer_begin()
        try:
            return original(*args, **kwargs)
        finally:
            session.optimizer_end()

    optimizer.step = step

    def undo() -> None:
        if vars(optimizer).get("step") is not step:
            return
        if own:
            optimizer.step = original
        else:
            del optimizer.step

    return undo
