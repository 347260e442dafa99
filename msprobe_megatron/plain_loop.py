"""Where a step begins in a loop that has no Megatron schedule: at the first forward of the attached model.

One hook on the model itself, for as long as it is attached. Forwards without gradients (evaluation) and those
inside the autograd engine (recomputation) are no training microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from msprobe_megatron.clock import inside_backward
from msprobe_megatron.topology import names


class Steps(Protocol):
    """Who is told that the attached model runs."""

    def forward_begin(self, model: nn.Module) -> None:
        """The model is called to be trained."""


def watch_forwards(chunks: Iterable[nn.Module], steps: Steps) -> Callable[[], None]:
    """Tell `steps` of every training forward of these models; returns the way back.

    Example::

        stop = watch_forwards([model], session)
        ...
        stop()
    """

    def hook(model: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not inside_backward():
            steps.forward_begin(model)

    handles = [names.unwrap(chunk).register_forward_pre_hook(hook) for chunk in chunks]

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return stop
