"""The steps of a session: its states, the number of the step, and what happens at each event of the patches.

`StepEvents` is what the patches call. It sets the clock and drives the features; an error inside it disables the
session and never reaches the training code (`faults`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

from torch import nn

from msprobe_megatron.config import ProbeConfig
from msprobe_megatron.job.clock import Clock, Moment
from msprobe_megatron.job.control import Control
from msprobe_megatron.job.features.feature import NEVER, Features
from msprobe_megatron.job.messages import Messages
from msprobe_megatron.job.session.faults import FaultGuard, exclusive, guarded
from msprobe_megatron.job.session.patch_scopes import ROUTER, StepPatches
from msprobe_megatron.job.session.stops import describe_stop
from msprobe_megatron.topology import names
from msprobe_megatron.topology.host import framework


class State(Enum):
    """Where a session stands."""

    IDLE = "idle"
    """Between two steps."""
    IN_STEP = "in a step"
    """A step is running that is not recorded, or not any more."""
    RECORDING = "recording"
    """A step is running and recorded."""
    SLEEPING = "sleeping"
    """Nothing of the kit is on the model: until `wake`, or because this rank is not selected."""
    FAULTED = "faulted"
    """An internal error has happened; hooks may be installed until the step is over, but record nothing."""
    DISABLED = "disabled"
    """After a fault, with everything removed; steps are only counted."""
    CLOSED = "closed"
    """The run is over."""

    __hash__ = object.__hash__  # that of Enum runs Python code, in every step of the job


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.IDLE: frozenset({State.IN_STEP, State.SLEEPING, State.FAULTED, State.CLOSED}),
    State.IN_STEP: frozenset({State.RECORDING, State.IDLE, State.SLEEPING, State.FAULTED, State.CLOSED}),
    State.RECORDING: frozenset({State.IN_STEP, State.IDLE, State.SLEEPING, State.FAULTED, State.CLOSED}),
    State.SLEEPING: frozenset({State.SLEEPING, State.IDLE, State.FAULTED, State.CLOSED}),
    State.FAULTED: frozenset({State.DISABLED, State.CLOSED}),
    State.DISABLED: frozenset({State.CLOSED}),
    State.CLOSED: frozenset(),
}
OFF = frozenset({State.FAULTED, State.DISABLED, State.CLOSED})
"""States that nothing leads back from. A fault comes from any thread at any time, so that a transition to any other
state may be attempted a moment later: it is ignored and not an error."""


class IllegalTransition(Exception):
    """The session was about to do something that does not follow from its state: an error of the kit."""


class Lifecycle:
    """The state of one session. Thread-safe."""

    def __init__(self, state: State = State.IDLE) -> None:
        self.state = state
        self._lock = threading.Lock()

    def move(self, target: State) -> State:
        """Enter `target`; returns the state before. Raises `IllegalTransition` if the table does not allow it."""
        with self._lock:
            before = self.state
            if target in TRANSITIONS[before]:
                self.state = target
            elif before not in OFF:
                raise IllegalTransition(f"from {before.value!r} to {target.value!r}")
            return before


class StepCounter:
    """The number of the running step: from the caller, else Megatron's iteration, else counted from where it resumed.

    Example::

        >>> steps = StepCounter(first=7)
        >>> steps.begin()
        7
        >>> steps.end()
        >>> steps.begin()
        8
    """

    def __init__(self, first: int | Callable[[], int] | None) -> None:
        self._source = first if callable(first) else None
        self._count = first if isinstance(first, int) else -1
        self.first = self.last = -1

    def begin(self) -> int:
        """The number of the step that begins now; the same until `end`."""
        if self._source is not None:
            self._count = int(self._source())
        else:
            iteration = framework.megatron_iteration()
            if iteration is not None:
                self._count = iteration
            elif self._count < 0:
                self._count = framework.resumed_iteration()
        self.last = self._count
        if self.first < 0:
            self.first = self._count
        return self._count

    def end(self) -> None:
        """The step is over."""
        self._count += 1


class StepEvents:
    """The half of a `Session` that runs in every step."""

    config: ProbeConfig
    clock: Clock
    features: Features
    messages: Messages
    faults: list[str]
    in_schedule = False
    """Inside the call of a schedule (or what stands for one): calls of the model are part of it."""
    _lifecycle: Lifecycle
    _steps: StepCounter
    _next_step = NEVER
    """The first step that a feature wants; all steps before it only compare this number."""
    _recorded: int
    _by_hand: bool
    """Only `step()` ends a step, where there is no optimizer."""
    _schedules: set[str]
    _stops: list[str]
    """Steps that an exception ended, in words."""
    _chunks: list[nn.Module]
    _chunk_of: dict[int, int]
    _optimizer: Any
    _control: Control
    _guard: FaultGuard
    _step_patches: StepPatches

    @property
    def state(self) -> State:
        """Where the session stands."""
        return self._lifecycle.state

    @property
    def closed(self) -> bool:
        """Whether the run is over."""
        return self.state is State.CLOSED

    def _move(self, target: State) -> State:
        """Enter `target`, unless a fault or the end came first; returns the state before."""
        try:
            return self._lifecycle.move(target)
        except IllegalTransition as error:
            self.fault(error, "session")
            return State.FAULTED

    # Events of the patches.

    @guarded
    def session_of(self, model: Any) -> StepEvents | None:
        """The session itself, if `model` is one of its chunks."""
        return self if self._index_of(model) is not None else None

    def _index_of(self, model: Any) -> int | None:
        found = self._chunk_of.get(id(model))
        if found is None and isinstance(model, nn.Module):
            found = self._chunk_of.get(id(names.unwrap(model)))
        return found

    def schedule_begin(self, schedule: str, num_microbatches: int | None) -> None:
        """A training schedule starts: the first one of a step begins the step."""
        self.in_schedule = True
        state = self._lifecycle.state
        if state is State.IDLE:
            self._begin_step(schedule)
        elif state in (State.IN_STEP, State.RECORDING):
            self._continue_step(num_microbatches)
        else:
            if state is State.FAULTED:
                self._disable()
            self._count_step()

    @guarded
    def _begin_step(self, schedule: str) -> None:
        if self._move(State.IN_STEP) is not State.IDLE:
            return
        before = self._steps.first
        step = self.messages.step = self._steps.begin()
        if before < 0 and self.config.steps.after_start:
            self.config.steps.begin_at(step)
            self._next_step = self.features.next_from(step)
        if self._control.apply_due(step, self.features.obey):
            self._next_step = self.features.next_from(step)
        if step >= self._next_step:
            self._record_step(step, schedule)

    def _record_step(self, step: int, schedule: str) -> None:
        if not self.features.choose(step):
            self._next_step = self.features.next_from(step)
            return
        self.clock.start_step(step)
        self._calls = [0] * len(self._chunks)
        self._schedules.add(schedule)
        self._step_patches.apply(memory=self.features.watch_memory)
        self.features.begin()
        self._move(State.RECORDING)

    @guarded
    def _continue_step(self, num_microbatches: int | None) -> None:
        if not framework.rerunning():
            # Gradient accumulation by hand: one step, its microbatches go on counting.
            self.clock.offset += num_microbatches or 0
        elif self.state is State.RECORDING:
            # Megatron repeats the step to check that the result is the same; the first attempt is the record.
            self.features.detach()
            self._step_patches.revert()

    @guarded
    def _count_step(self) -> None:
        """After a fault, so that the end of the run does not report steps as never reached."""
        if self.state is State.DISABLED:
            self.messages.step = self._steps.begin()

    def schedule_failed(self) -> None:
        """The schedule raised: keep what was recorded up to here."""
        self._guard.report_stop_of_other_rank()
        if self.state is State.RECORDING:
            self._tell_stop(self.clock.moment.microbatch)
            self._finish(State.IN_STEP, complete=False)

    @guarded
    def _tell_stop(self, microbatch: int | None) -> None:
        """Say where the step stopped, if an exception ends it."""
        # At the exit of a process the exception that ended it; an interactive one may have met it long before.
        error = sys.exc_info()[1] or (None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
        if isinstance(error, Exception):
            self._stops.append(describe_stop(error, self.clock.step, microbatch, self._chunks))
            self.messages.report(self._stops[-1], "stopped")

    def schedule_end(self) -> None:
        """The schedule returned; without an optimizer the step ends here."""
        self.in_schedule = False
        if self._by_hand:
            return
        self._notify(self.features.calls_end)
        if self._optimizer is None:
            self.optimizer_begin()
            self.optimizer_end()

    @guarded
    def microbatch_begin(self, model: Any, microbatch: int | None, store: list[Any]) -> None:
        """The forward of a microbatch starts on a chunk."""
        if self.state is not State.RECORDING:
            return
        chunk = self._index_of(model) or 0
        number = self._calls[chunk] if microbatch is None else microbatch
        self._calls[chunk] += 1
        self.clock.moment = Moment(self.clock.offset + number, chunk)
        self._stored = len(store)
        self.features.microbatch(self.clock.moment)

    @guarded
    def microbatch_end(self, store: list[Any]) -> None:
        """The forward of a microbatch has ended; the last stage has stored what the loss function reported."""
        if self.state is State.RECORDING and len(store) > self._stored:
            self.features.reported(store[-1], self.clock.moment)

    @exclusive
    def forward_begin(self, model: nn.Module) -> None:
        """A plain loop calls the model: the first call of a step begins it, each call is a microbatch."""
        if self.in_schedule:
            return
        if self.state is State.IDLE:
            self._begin_step("plain loop")
        else:
            self._count_step()
        self.microbatch_begin(model, None, [])

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        """While the model runs without gradients: an evaluation in the middle of a step is not part of it."""
        self._notify(self.features.pause)
        try:
            yield
        finally:
            self._notify(self.features.resume)

    @exclusive
    def _notify(self, call: Callable[[], None]) -> None:
        if self._lifecycle.state is State.RECORDING:
            try:
                call()
            except Exception as error:
                self.fault(error, call.__name__)

    def step(self) -> None:
        """End the step by hand, where no optimizer was given or its step was skipped; otherwise does nothing."""
        if self.state not in (State.IDLE, State.SLEEPING, State.CLOSED):
            if self._optimizer is None:
                self.optimizer_begin()
            self.optimizer_end()

    def moment(self) -> Moment:
        """Microbatch and chunk of the forward that is running."""
        return self.clock.moment

    @contextmanager
    def recomputing(self, moment: Moment | None) -> Iterator[None]:
        """While a checkpoint repeats a forward; what it computes is measured again."""
        self.memory_changed()
        with self.clock.recomputing(moment):
            yield
        self.memory_changed()

    @guarded
    def memory_changed(self) -> None:
        """Tensors may have changed without their version counters showing it."""
        self.features.memory_changed()

    def optimizer_begin(self) -> None:
        """The outermost optimizer is about to step."""
        self._notify(self.features.before_optimizer)

    @exclusive
    def optimizer_end(self, result: Any = None) -> None:
        """The optimizer has stepped and returned `result`: the step is over."""
        state = self._lifecycle.state
        if state is State.IN_STEP:  # first, because most steps are not recorded
            self._steps.end()
            self._move(State.IDLE)
            return
        if state in (State.SLEEPING, State.CLOSED):
            return
        if state is State.IDLE:
            self._bind_lost_patches()
        self._steps.end()
        if state is State.RECORDING:
            self._finish(State.IDLE, complete=True, result=result)
        elif state is State.FAULTED:
            self._disable()

    @guarded
    def _bind_lost_patches(self) -> None:
        """An optimizer steps in a step that no schedule began: has other code replaced the schedule?"""
        lost = ROUTER.verify()
        if lost:
            self.messages.report(f"other code had overwritten {', '.join(lost)}; patched again", "overridden")

    @guarded
    def _finish(self, following: State, complete: bool, result: Any = None) -> None:
        if complete:
            self.features.after_optimizer(result)
        self._move(following)
        self.features.finish(complete)
        self._recorded += 1
        self._next_step = self.features.next_from(self.clock.step + 1)
        if self._next_step != self.clock.step + 1:
            # Between two consecutive recorded steps nothing is removed only to be installed again.
            self._step_patches.revert()

    # Faults and the end.

    def fault(self, error: BaseException, where: str) -> None:
        """Disable the session: an error of the kit never stops or alters training, unless `strict` requests it.

        From any thread. What another thread or a running call cannot remove is removed when the step is over.
        """
        before = self._lifecycle.move(State.FAULTED)
        if self._guard.take(error, where):  # between steps there is no call that our hooks could be missing from
            self._remove_all(self.features.silence if before is State.RECORDING else self.features.remove, error)

    @guarded
    def _disable(self) -> None:
        self._move(State.DISABLED)
        self._remove_all(self.features.remove)

    def _remove_all(self, quiet: Callable[[], None], error: BaseException | None = None) -> None:
        try:
            quiet()
            self._step_patches.revert()
        except Exception as another:  # the first fault is the one to report
            self.faults.append(f"disable: {another}")
        if not self.closed:
            self._guard.raise_if_strict(error)
