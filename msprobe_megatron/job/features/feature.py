"""What a session drives: its parts (dump, monitor, perturb, …), each told when a step begins, goes on and ends.

The session knows the clock and nothing of what is watched; a part knows its sites and probe and nothing of schedules.
A part says which step it wants next, so that on all others nothing of it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from msprobe_megatron.clock import Clock, Moment
from msprobe_megatron.config import ProbeConfig
from msprobe_megatron.config.orders import Order
from msprobe_megatron.record.directory import RunDirectory
from msprobe_megatron.record.watching import Watcher
from msprobe_megatron.topology.coordinates import Coordinates

NEVER = sys.maxsize


@dataclass(frozen=True)
class Job:
    """What every part is given: the model it is bound to, and the ways out of it."""

    config: ProbeConfig
    chunks: Sequence[nn.Module]
    optimizer: Any
    clock: Clock
    where: Coordinates
    directory: RunDirectory
    fault: Callable[[BaseException, str], None]
    """A fault of the kit: disarms the session."""
    submit: Callable[[Any], object]
    """Hands a batch to the writer thread."""
    say: Callable[[str, str], None]
    """`say(text, event)`: one line on standard error and one event."""
    watchers: list[Watcher] = field(default_factory=list)
    """Told of the monitor's figures of every watched step, in the writer thread."""
    request: Callable[..., None] = lambda **order: None
    """`request(next=3, level="mix")`: an order to all ranks, from any thread (`control.Control.request`)."""
    arguments: Any = None
    """The training arguments, where the caller of `attach` has them."""


class Part:
    """One thing that a session does on the steps it chose; every method of it may be left as it is here.

    Example::

        class Losses(Part):
            name = "losses"

            def next_from(self, step: int) -> int | None:
                return step + (-step) % 10          # every tenth step

            def reported(self, entry: Any, moment: Moment) -> None:
                ...
    """

    name = "part"

    def next_from(self, step: int) -> int | None:
        """The first step from `step` on that this part wants; None when there is none."""
        raise NotImplementedError

    def obey(self, order: Order) -> bool:
        """An order of the running job takes effect before the coming step; whether it concerns this part."""
        return False

    def describe(self) -> str:
        """What is going to happen, for the line that is printed at the start."""
        return self.name

    def begin(self) -> None:
        """A step that this part wants begins: `clock.step`."""

    def microbatch(self, moment: Moment) -> None:
        """The forward of a microbatch is about to run on a chunk."""

    def reported(self, entry: Any, moment: Moment) -> None:
        """The loss function of a microbatch has reported `entry`."""

    def saved(self, variable: Any, name: str, gradient: bool) -> None:
        """The training code hands over a variable under a name: `msprobe_megatron.save`."""

    def calls_end(self) -> None:
        """The schedule has returned: what is called from here on is not of the model."""

    def pause(self) -> None:
        """The model runs for something else than the step; gradients that are awaited stay awaited."""

    def resume(self) -> None:
        """The step goes on."""

    def memory_changed(self) -> None:
        """Tensors may have changed without their version counters telling."""

    def before_optimizer(self) -> None:
        """The outermost optimizer is about to step."""

    def after_optimizer(self, result: Any) -> None:
        """The outermost optimizer has stepped and returned `result`."""

    def finish(self, complete: bool) -> None:
        """The step is over, or was cut short: hand over what was seen."""

    def remove(self) -> None:
        """Take everything away from the model, also in the middle of a step; safe to call twice."""

    def close(self) -> None:
        """The run is over: hand over what is left."""

    def not_happened(self, last_step: int) -> list[str]:
        """What was asked and did not happen, as far as this rank can know."""
        return []

    def ledger(self) -> dict[str, Any]:
        """What was asked, bound, fired and written by this part."""
        return {}


class Parts:
    """The parts of a session, and those of them that want the running step.

    Example::

        parts = Parts([Dumping(job)])
        if parts.start(step=10):
            ...
        parts.finish(complete=True)
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.all = list(parts)
        self.active: list[Part] = []

    def next_from(self, step: int) -> int:
        """The first step from `step` on that any part wants; `NEVER` when there is none."""
        return min((n for part in self.all if (n := part.next_from(step)) is not None), default=NEVER)

    def choose(self, step: int) -> bool:
        """Find the parts that want this step; whether there is one."""
        self.active = [part for part in self.all if part.next_from(step) == step]
        return bool(self.active)

    def describe(self) -> str:
        """What is going to happen, in one line."""
        return "; ".join(part.describe() for part in self.all)

    def obey(self, order: Order) -> bool:
        """Hand an order to every part; whether it concerned any."""
        return any([part.obey(order) for part in self.all])

    def tell(self, what: str, *values: Any) -> None:
        """Call a method of every part that wants the running step."""
        for part in self.active:
            getattr(part, what)(*values)

    @property
    def watch_memory(self) -> bool:
        """Whether a part that wants the running step keeps figures of tensors, which communication may outdate."""
        return any(type(part).memory_changed is not Part.memory_changed for part in self.active)

    def memory_changed(self) -> None:
        """Tensors may have changed without their version counters telling."""
        for part in self.active:
            part.memory_changed()

    def finish(self, complete: bool) -> None:
        """End the step for the parts that wanted it."""
        active, self.active = self.active, []
        for part in active:
            part.finish(complete)

    def silence(self) -> None:
        """In the middle of a step: let every part ignore what it sees. torch may be walking over its hooks just now."""
        self.active = []
        _each([part.pause for part in self.all])

    def remove(self) -> None:
        """Take everything of every part away from the model."""
        self.active = []
        _each([part.remove for part in self.all])

    def ledger(self) -> dict[str, Any]:
        """The ledgers of all parts: that of the dump stands at the top, the others under their names."""
        found: dict[str, Any] = {}
        for part in self.all:
            found.update(part.ledger() if part.name == "dump" else {part.name: part.ledger()})
        return found


def _each(calls: Sequence[Callable[[], None]]) -> None:
    """Make every call, whatever becomes of the others; then raise the first error."""
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
