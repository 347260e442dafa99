"""Identity, memory of what was seen, statistics and row of a tensor in one compiled call.

Stands before `once` and `measurer` in a probe that wants statistics only: a plain tensor of host memory needs
neither of them. What the call does not take goes the way through Python, which gives the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from msprobe_megatron import native
from msprobe_megatron.measure.measurer import Measurer
from msprobe_megatron.native.looking import NO_ROOM, NOT_MINE

__all__ = ["NOT_MINE", "NO_ROOM", "Look", "WriteRow", "looks", "row_writer"]

WriteRow = Callable[[Any, torch.Tensor, int | None, str], tuple[Any, ...] | Literal[False] | None]


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


def row_writer(look: Look, weights: Look, clock: Any, dtypes: dict[torch.dtype, str]) -> WriteRow:
    """What writes the row of a tensor in one compiled call: looks at it, and numbers it by ``clock.seq``.

    Gives the cells of a `Sighting`, False without a free slot, and None for what has to be seen in Python: a tensor
    that the look does not take, or a shape or a dtype that the place and ``dtypes`` do not know yet.

    Example::

        write = row_writer(new(), new(), clock, {torch.float32: "float32"})
        cells = write(place, tensor, 0, "forward")
    """
    write: WriteRow = native.look().Notes(look, weights, clock, dtypes).row  # type: ignore[union-attr]
    return write
