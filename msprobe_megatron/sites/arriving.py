"""Gradients on their way through the graph: one hook a tensor, however many modules have a row of its gradient.

Where the output of a module is that of the module around it and the input of the next, their rows share the hook of
the tensor. It is entered where torch keeps the hooks of a tensor, without the handle that would take it away again:
nobody asks for it, and it costs more than the hook. Where torch keeps them elsewhere it is registered as usual.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from msprobe_megatron.clock import Moment
from msprobe_megatron.sites.arguments import own_work
from msprobe_megatron.topology.places import Place

See = Callable[[Place, torch.Tensor, Moment], None]


class Arriving:
    """The hook of one tensor: tells of its gradient for every place that has asked.

    `see` is the one of this step: another one belongs to another step or site, and shares nothing.
    """

    __slots__ = ("see", "sightings")

    def __init__(self, see: See, place: Place, moment: Moment) -> None:
        self.see, self.sightings = see, [(place, moment)]

    def __call__(self, gradient: torch.Tensor) -> None:
        """The gradient has come together."""
        see = self.see
        with own_work():
            for place, moment in self.sightings:
                see(place, gradient, moment)


def await_gradient(tensor: torch.Tensor, see: See, place: Place, moment: Moment) -> None:
    """Call ``see(place, gradient, moment)`` when the gradient of ``tensor`` has come together; `see` must not raise.

    Example::

        await_gradient(output, self._see_gradient, place, clock.moment)
    """
    hooks: Any = tensor._backward_hooks
    if hooks:
        last = next(reversed(hooks.values()))
        # Behind the hook of somebody else the gradient may be another one.
        if last.__class__ is Arriving and last.see is see:
            last.sightings.append((place, moment))
            return
    hook = Arriving(see, place, moment)
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
