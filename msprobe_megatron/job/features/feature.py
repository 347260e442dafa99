"""The base class of features (dump, monitor, perturb, …) and the set of features that a session drives.

The session knows the clock and not what is observed; a feature knows its sites and its probe and not the schedule. A
feature names the next step that it wants, so that nothing of it runs on any other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from msprobe_megatron.config import ProbeConfig, StepSelection
from msprobe_megatron.config.control_orders import Order
from msprobe_megatron.job.clock import Clock, Moment
from msprobe_megatron.job.record.monitor_files import Watcher
from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.topology.coordinates import Coordinates

NEVER = sys.maxsize


class Seen(NamedTuple):
    """The first and the last step that this rank has seen begin; -1 of a job that has not begun."""

    first: int = -1
    last: int = -1

    def describe(self) -> str:
        """In words."""
        return f"last step was {self.last}" if self.first <= 0 else f"steps were {self.first} to {self.last}"


@dataclass(frozen=True)
class JobContext:
    """What every feature is given: the model it is bound to, and the services of the session."""

    config: ProbeConfig
    chunks: Sequence[nn.Module]
    optimizer: Any
    clock: Clock
    where: Coordinates
    directory: RunDirectory
    fault: Callable[[BaseException, str], None]
    """`fault(error, where)`: report an internal error, which disarms the session."""
    submit: Callable[[Any], object]
    """`submit(batch)`: queue a `record.writer.Batch` for the writer thread."""
    say: Callable[[str, str], None]
    """`say(text, event)`: one line on standard error and one event."""
    watchers: list[Watcher] = field(default_factory=list)
    """See the monitor's statistics of every watched step, in the writer thread. Features append themselves."""
    request: Callable[..., None] = lambda **order: None
    """`request(next=3, level="mix")`: an order to all ranks, from any thread (`control.Control.request`)."""
    arguments: Any = None
    """The training arguments, if the caller of `attach` has them."""

    @property
    def holds_whole_model(self) -> bool:
        """True if no other rank can hold a module or parameter whose name this rank lacks."""
        return self.where.pp_size == 1 and self.where.ep_size == 1


class Feature:
    """One section of the probe file, bound to a model. A subclass overrides what it needs.

    Per wanted step the calls come in the order of the methods here, from `begin` to `finish`.
    """

    name = "feature"

    def next_from(self, step: int) -> int | None:
        """The first step from `step` on that this feature wants; None when there is none."""
        raise NotImplementedError

    def obey(self, order: Order) -> bool:
        """Apply an order of the running job before the coming step; True if it concerns this feature."""
        return False

    def describe(self) -> str:
        """What is going to happen, for the line that is printed at the start."""
        return self.name

    def begin(self) -> None:
        """A wanted step begins: `clock.step`."""

    def microbatch(self, moment: Moment) -> None:
        """The forward of a microbatch is about to run on a chunk."""

    def reported(self, entry: Any, moment: Moment) -> None:
        """The loss function of a microbatch has reported `entry`."""

    def saved(self, variable: Any, name: str, gradient: bool) -> None:
        """The training code passes a variable under a name: `msprobe_megatron.save`."""

    def pause(self) -> None:
        """The model runs for something else than the step (an evaluation); pending gradients stay pending."""

    def resume(self) -> None:
        """The step continues."""

    def memory_changed(self) -> None:
        """Tensors may have changed without a change of their version counters."""

    def calls_end(self) -> None:
        """The schedule has returned: later calls are not part of the model."""

    def before_optimizer(self) -> None:
        """The outermost optimizer is about to step."""

    def after_optimizer(self, result: Any) -> None:
        """The outermost optimizer has stepped and returned `result`."""

    def finish(self, complete: bool) -> None:
        """The step is over, or was cut short: submit what was observed."""

    def remove(self) -> None:
        """Remove everything from the model, also in the middle of a step. Idempotent."""

    def close(self) -> None:
        """The run is over: submit what is left."""

    def not_happened(self, seen: Seen) -> list[str]:
        """What was requested and did not happen, as far as this rank can know."""
        return []

    def ledger(self) -> dict[str, Any]:
        """What this feature was configured for, bound, observed and wrote."""
        return {}


class Features:
    """All features of a session, and the active ones: those that want the running step."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self.all = list(features)
        self.active: list[Feature] = []

    def next_from(self, step: int) -> int:
        """The first step from `step` on that any feature wants; `NEVER` when there is none."""
        return min((n for feature in self.all if (n := feature.next_from(step)) is not None), default=NEVER)

    def choose(self, step: int) -> bool:
        """Activate the features that want this step; False if none does."""
        self.active = [feature for feature in self.all if feature.next_from(step) == step]
        return bool(self.active)

    def describe(self) -> str:
        """What is going to happen, in one line."""
        return "; ".join(feature.describe() for feature in self.all)

    def obey(self, order: Order) -> bool:
        """Pass an order to every feature; False if it concerned none."""
        return any([feature.obey(order) for feature in self.all])

    # Calls of a running step, to the active features.

    def begin(self) -> None:
        """The step begins."""
        for feature in self.active:
            feature.begin()

    def microbatch(self, moment: Moment) -> None:
        """The forward of a microbatch is about to run on a chunk."""
        for feature in self.active:
            feature.microbatch(moment)

    def reported(self, entry: Any, moment: Moment) -> None:
        """The loss function of a microbatch has reported `entry`."""
        for feature in self.active:
            feature.reported(entry, moment)

    def saved(self, variable: Any, name: str, gradient: bool) -> None:
        """The training code passes a variable under a name."""
        for feature in self.active:
            feature.saved(variable, name, gradient)

    def pause(self) -> None:
        """The model runs for something else than the step."""
        for feature in self.active:
            feature.pause()

    def resume(self) -> None:
        """The step continues."""
        for feature in self.active:
            feature.resume()

    @property
    def watch_memory(self) -> bool:
        """True if an active feature caches statistics of tensors, which communication may invalidate."""
        return any(type(feature).memory_changed is not Feature.memory_changed for feature in self.active)

    def memory_changed(self) -> None:
        """Tensors may have changed without a change of their version counters."""
        for feature in self.active:
            feature.memory_changed()

    def calls_end(self) -> None:
        """The schedule has returned."""
        for feature in self.active:
            feature.calls_end()

    def before_optimizer(self) -> None:
        """The outermost optimizer is about to step."""
        for feature in self.active:
            feature.before_optimizer()

    def after_optimizer(self, result: Any) -> None:
        """The outermost optimizer has stepped and returned `result`."""
        for feature in self.active:
            feature.after_optimizer(result)

    def detach(self) -> None:
        """Remove the active features from the model; the step still ends with `finish`."""
        for feature in self.active:
            feature.remove()

    def finish(self, complete: bool) -> None:
        """End the step; no feature is active afterwards."""
        active, self.active = self.active, []
        for feature in active:
            feature.finish(complete)

    # Faults and the end.

    def silence(self) -> None:
        """In the middle of a step: make every feature ignore what it sees, while torch may be iterating its hooks."""
        self.active = []
        _each([feature.pause for feature in self.all])

    def remove(self) -> None:
        """Remove all features from the model."""
        self.active = []
        _each([feature.remove for feature in self.all])

    def ledger(self) -> dict[str, Any]:
        """The ledgers of all features: the dump's at the top level, the others under their names."""
        found: dict[str, Any] = {}
        for feature in self.all:
            found.update(feature.ledger() if feature.name == "dump" else {feature.name: feature.ledger()})
        return found


def _each(calls: Sequence[Callable[[], None]]) -> None:
    """Make every call even if some fail; then raise the first error."""
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def missing_steps(requested: StepSelection, recorded: Sequence[int], seen: Seen, *, selects_nothing: bool) -> list[str]:
    """Requested steps that this rank did not record, as lines for the user."""
    found = []
    following = requested.next_from(max(recorded) + 1) if recorded else None
    if not recorded:
        found.append(f"no step was recorded; requested: {requested.describe()}, {seen.describe()}")
    elif following is not None and requested.is_finite:
        found.append(f"step {following} was requested and never reached; last step was {seen.last}")
    early = requested.before(seen.first) if recorded and requested.is_finite else StepSelection(())
    if early.spans:
        steps = "step" if early.last == early.next_from(0) else "steps"
        found.append(f"{steps} {early.describe()} requested and not there: the job began at step {seen.first}")
    if selects_nothing:
        found.append("no module or parameter of this rank is selected")
    return found
