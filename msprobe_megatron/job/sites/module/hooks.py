"""Setting hooks cheaply and removing them: on modules, and on the tensors whose gradients are awaited.

Module hooks are registered as usual the first time; afterwards their entries go back under the same keys, which costs a
tenth and allocates nothing. A tensor gets one hook, however many modules have a row of its gradient: the output of a
module is also that of the module around it and the input of the next. It is entered where torch keeps the hooks of a
tensor, without a handle to remove it: the handle would cost more than the hook. Where torch keeps its hooks elsewhere,
both are registered as usual.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from msprobe_megatron.job.clock import Moment
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.topology.shards import Place


class Handle(Protocol):
    """Something that was set on the model: a handle of torch, or `ModuleHooks`."""

    def remove(self) -> None:
        """Remove it."""


class HookedSite:
    """A site that sets hooks on the model: `_handles` are removed, and `_active` says whether hooks do anything."""

    def __init__(self) -> None:
        self._active = False
        self._handles: list[Handle] = []

    def pause(self) -> None:
        """Ignore what the hooks see, and leave them in place."""
        self._active = False

    def resume(self) -> None:
        """Go on after `pause`."""
        self._active = True

    def remove(self) -> None:
        """Remove all hooks. Safe to call twice."""
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles = []


class ModuleHooks:
    """A hook before and one after the forward of a module, with keyword arguments; `always`: also if it raises."""

    __slots__ = ("_after", "_always", "_before", "_handles", "_module")

    def __init__(
        self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any], always: bool = False
    ) -> None:
        self._module, self._before, self._after, self._always = module, before, after, always
        self._handles: tuple[Any, Any] | None = None

    def set(self) -> None:
        """Set both, after the hooks that others have set meanwhile."""
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
        """Remove both. Safe to call twice."""
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


See = Callable[[Place, torch.Tensor, Moment], None]


class GradientHook:
    """The hook of one tensor: reports its gradient for every place that awaits it.

    `see` is a function of the current step, so hooks of other steps or sites are never shared.
    """

    __slots__ = ("awaiting", "see")

    def __init__(self, see: See, place: Place, moment: Moment) -> None:
        self.see, self.awaiting = see, [(place, moment)]

    def __call__(self, gradient: torch.Tensor) -> None:
        """The gradient is complete."""
        see = self.see
        with untraced():
            for place, moment in self.awaiting:
                see(place, gradient, moment)


def await_gradient(tensor: torch.Tensor, see: See, place: Place, moment: Moment) -> None:
    """Call ``see(place, gradient, moment)`` once the gradient of ``tensor`` is complete; `see` must not raise."""
    hooks: Any = tensor._backward_hooks
    if hooks:
        last = next(reversed(hooks.values()))
        # A hook of the training code that was set later may replace the gradient: then a new one is needed.
        if last.__class__ is GradientHook and last.see is see:
            last.awaiting.append((place, moment))
            return
    hook = GradientHook(see, place, moment)
    try:
        if hooks is None:
            node: Any = tensor.grad_fn
            register = node._register_hook_dict if node is not None else None
            hooks = tensor._backward_hooks = OrderedDict()
            if register is not None:
                register(tensor)
        hooks[hook] = hook
    except AttributeError:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
