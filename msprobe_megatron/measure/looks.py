"""Identity, memory of what was seen, and statistics of a tensor in one compiled call.

Stands before `once` and `measurer` in a probe that wants statistics only: a plain tensor of host memory needs
neither of them. What the call does not take goes the way through Python, which gives the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from msprobe_megatron import native
from msprobe_megatron.measure.measurer import Measurer
from msprobe_megatron.native.looking import NO_ROOM, NOT_MINE

__all__ = ["NOT_MINE", "NO_ROOM", "Look", "looks"]


class Look(Protocol):
    """What one step has seen; holds no tensor and keeps no storage alive."""

    def see(self, x: torch.Tensor) -> int:
        """The slot that holds the figures of ``x`` as it is now; NO_ROOM without a free one; NOT_MINE."""

    def forget_all(self) -> None:
        """Something was written that version counters do not tell of."""

    def __len__(self) -> int:
        """How many tensors are known."""


def looks(measurer: Measurer, take: Callable[[], int]) -> Callable[[], Look] | None:
    """A maker of looks, one for each step, that measure into slots of ``take``; None where there is no compiled one.

    Example::

        new = looks(measurer, table.take)
        slot = new().see(x) if new is not None else NOT_MINE
    """
    compiled = measurer.compiled
    if compiled is None or compiled.numbered:
        return None
    module = native.load_look()
    if module is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        samples = [
            (torch.empty(0, dtype=dtype, device="cpu"), code, values)
            for dtype, (code, values) in compiled.codes.items()
        ]
    kinds = (torch.Tensor, torch.nn.Parameter)
    # The tables of values of 8-bit dtypes lie in `compiled`, which must live as long as what reads them.
    eye = module.Eye(take, measurer.addresses, *native.kernel_addresses(), *kinds, samples, compiled)
    return lambda: module.Look(eye)
