"""The two forward hooks of a module, set and taken away again on every recorded step.

The first time they are registered as usual; afterwards their entries go back under the same keys, which costs a tenth
and makes no new objects. Where torch keeps its hooks elsewhere they are registered anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class ModuleHooks:
    """A hook before the forward and one after it, both with keyword arguments; `always`: after one that raises too.

    Example::

        hooks = ModuleHooks(module, before, after)
        hooks.set(); ...; hooks.remove()
    """

    __slots__ = ("_after", "_always", "_before", "_handles", "_module")

    def __init__(
        self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any], always: bool = False
    ) -> None:
        self._module, self._before, self._after, self._always = module, before, after, always
        self._handles: tuple[Any, Any] | None = None

    def set(self) -> None:
        """Set both; behind the hooks that others have set meanwhile."""
        module: Any = self._module
        if self._handles is not None:
            first, last = self._handles[0].id, self._handles[1].id
            try:
                module._forward_pre_hooks_with_kwargs[first] = True
                module._forward_hooks_with_kwargs[last] = True
                if self._always:
                    module._forward_hooks_always_called[last] = True
                module._forward_pre_hooks[first] = self._before
                module._forward_hooks[last] = self._after
                return
            except AttributeError:
                self.remove()
        self._handles = (
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True, always_call=self._always),
        )

    def remove(self) -> None:
        """Take both away. Safe to call twice."""
        if self._handles is None:
            return
        module: Any = self._module
        first, last = self._handles
        try:
            module._forward_pre_hooks.pop(first.id, None)
            module._forward_hooks.pop(last.id, None)
            module._forward_pre_hooks_with_kwargs.pop(first.id, None)
            module._forward_hooks_with_kwargs.pop(last.id, None)
            if self._always:
                module._forward_hooks_always_called.pop(last.id, None)
        except AttributeError:
            first.remove()
            last.remove()
