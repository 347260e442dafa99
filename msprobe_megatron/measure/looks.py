"""Identity, memory of what was seen, statistics and row of a tensor in one compiled call.

Stands before `once` and `measurer` in a probe that wants statistics, digests and sketches: a plain tensor of host
memory needs neither of them. What the call does not take goes the way through Python, which gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from msprobe_megatron import native
from msprobe_megatron.measure.measurer import Measurer
from msprobe_megatron.native.looking import NO_ROOM, NOT_MINE

__all__ = ["NOT_MINE", "NO_ROOM", "Look", "Pen", "See", "looks", "pen"]

See = Callable[[Any, torch.Tensor, int | None, str], None]


class Look(Protocol):
    """What one step has seen; holds no tensor and keeps no storage alive."""

    def see(self, x: torch.Tensor) -> int:
        """The slot that holds the figures of ``x`` as it is now; NO_ROOM without a free one; NOT_MINE."""

    def forget_all(self) -> None:
        """Something was written that version counters do not tell of."""

    def __len__(self) -> int:
        """How many tensors are known."""


class Pen(Protocol):
    """Writes rows on the page of the running step."""

    def __call__(self, place: Any, tensor: torch.Tensor, microbatch: int | None, phase: str, /) -> None:
        """Measure a tensor, unless it was measured a moment ago, and write its row."""

    def turn(self, look: Look = ..., weights: Look = ..., cells: list[Any] = ..., /) -> None:
        """Write on another page: two looks, of tensors and of parameters, and its cells; without them on none."""


class Slots(Protocol):
    """Where figures go: `record.slots.SlotTable`, as far as it matters here."""

    def count_by(self, restart: Callable[[], Iterator[int]]) -> None:
        """Number slots by this counter."""

    def grow(self, slot: int) -> int:
        """Make room for a slot."""


def looks(measurer: Measurer, slots: Slots) -> Callable[[], Look] | None:
    """A maker of looks, one for each step, that measure into slots of a table; None where there is no compiled one.

    Example::

        new = looks(measurer, table)
        slot = new().see(x) if new is not None else NOT_MINE
    """
    compiled = measurer.compiled
    if compiled is None:
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
    counter = module.Counter()
    slots.count_by(counter.restart)
    # The tables of values of 8-bit dtypes lie in `compiled`, which must live as long as what reads them.
    eye = module.Eye(counter, slots.grow, measurer.addresses, *native.kernel_addresses(), *kinds, samples, compiled)
    return lambda: module.Look(eye)


def pen(
    clock: Any,
    describe: Callable[[Any, torch.Tensor], tuple[Any, ...] | None],
    slow: See,
    late: Callable[[int], None],
    *,
    numbered: bool,
) -> Pen:
    """What writes the row of a tensor in one compiled call: looks at it, and numbers the row by ``clock.seq``.

    ``describe(place, tensor)`` gives what the rows of a place have in common as long as shape, strides and dtype stay:
    layout, name of the dtype, extra, number of the numbering, address of its plan, and who keeps the plan; or None.
    ``slow`` does the same as the pen for what it does not take, ``late`` is told of a slot whose page is closed.

    Example::

        write = pen(clock, describe, self.see, self._too_late, numbered=False)
        write.turn(new(), new(), cells)
        write(place, tensor, 0, "forward")
    """
    made: Pen = native.look().Pen(clock, describe, slow, late, numbered)  # type: ignore[union-attr]
    return made
