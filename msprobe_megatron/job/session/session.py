"""The life of one armed job: attach, the clock driven by the schedule, recorded steps, faults, close.

The session stands above everything else: it wires sites to probes and probes to the writer, and it is what the
patches talk to. Between recorded steps it keeps two wrappers (schedule and `optimizer.step`) that compare one
integer; hooks and all other patches exist only while a step is recorded.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from msprobe_megatron import facts, native
from msprobe_megatron.all_the_time import AllTheTime
from msprobe_megatron.clock import Clock, Moment
from msprobe_megatron.config import ProbeConfig
from msprobe_megatron.control import Control
from msprobe_megatron.dispatch import DISPATCHER
from msprobe_megatron.dumping import Dumping
from msprobe_megatron.fault_guard import REFUSALS, FaultGuard, alone, guarded
from msprobe_megatron.parts import NEVER, Job, Parts
from msprobe_megatron.parts_asked import make_parts
from msprobe_megatron.record.directory import RunDirectory
from msprobe_megatron.record.writer import Writer
from msprobe_megatron.step_numbers import StepNumbers
from msprobe_megatron.topology import coordinates, host, names
from msprobe_megatron.voice import Voice, last_line
from msprobe_megatron.while_recording import WhileRecording


class Session:
    """One armed model. Made by `attach`; ends with `close` or with the process.

    Example::

        session = attach(chunks, optimizer, "probe.yaml")
        ...
        session.close()
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: Any,
        config: ProbeConfig,
        *,
        tag: str | None = None,
        step: int | Callable[[], int] | None = None,
        arguments: Any = None,
        groups: Any = None,
    ) -> None:
        self.config, self.clock = config, Clock()
        self.where = coordinates.current() if groups is None else coordinates.from_groups(groups)
        config.ranks.check(self.where.world, self.where.sizes())
        self.selected = config.ranks.selects(self.where.rank, self.where.position())
        self.closed, self._steps = False, 0
        self._chunks, self._optimizer = list(chunks), optimizer
        self._chunk_of = {id(m): i for i, chunk in enumerate(chunks) for m in (chunk, names.unwrap(chunk))}
        self._numbers = StepNumbers(step)
        self._open = self._recording = self.in_schedule = False
        self._schedules: set[str] = set()
        self._next = NEVER
        output = Path(config.output) / tag if tag else Path(config.output)
        self.directory = RunDirectory.create(output)
        self.voice = Voice(self.directory, self.where.rank)
        self.faults = self.voice.faults
        self._guard = FaultGuard(self.voice, config.strict)
        if self.selected or self.where.rank == 0:
            # Before anything is written: a directory that holds a run is refused, never mixed.
            self.directory.claim_rank(self.where.rank, coordinates.job_identity(self.where.world))
        self.parts = Parts([])
        try:
            self._arm(arguments, tag)
        except REFUSALS:
            raise
        except Exception as error:  # a fault of the kit, not of what was asked
            self._guard.take(error, "attach")
            self.close()

    def _arm(self, arguments: Any, tag: str | None) -> None:
        config = self.config
        if self.where.rank == 0:
            run = facts.run_facts(config, self.where, self._chunks, arguments, tag)
            self.directory.write_json("run.json", run)
            for text in run["unseen"]:
                self.voice.say(text, "unseen")
        if not self.selected:
            return
        native.load(tell=self.voice.tell)
        identity, disk = {"rank": self.where.rank, **self.where.position()}, config.limits.disk
        self.writer = Writer(
            self.directory,
            identity,
            config.limits.host_memory // 2,
            lambda error: self.fault(error, "writer"),
            disk_bytes=None if disk is None else disk // self.where.world,
            on_limit=lambda text: self.voice.say(text, "drop"),
        )
        plain = coordinates.parallel_state() is None
        self._while_recording = WhileRecording(self, plain=plain)
        self._all_the_time = AllTheTime(self, self._chunks, self._chunk_of, self._optimizer, plain=plain)
        self._control = Control(self.directory.path, self.where, config.ranks, self.voice.say)
        model = (self._chunks, self._optimizer, self.clock, self.where, self.directory)
        said = (self.fault, self.writer.submit, self.voice.say)
        job = Job(config, *model, *said, request=self._control.request, arguments=arguments)
        self.parts = Parts(make_parts(job))
        self._leave_ledger()
        self._all_the_time.apply()
        self._next = self.parts.next_from(0)
        atexit.register(self.close)
        self.voice.tell(f"{self.parts.describe()} into {self.directory.path}")

    # What the patches tell.

    @guarded
    def session_of(self, model: Any) -> Session | None:
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
        if self._open:
            self._go_on(num_microbatches)
            return
        self._open = True
        step = self._coming()
        if step is None or step < self._next or self.closed:
            return
        self._start(step, schedule)

    @guarded
    def _coming(self) -> int | None:
        step = self.voice.step = self._numbers.coming()
        if self._control.tell(step, self.parts.obey) and not self._guard.first:
            self._next = self.parts.next_from(step)
        return step

    @guarded
    def _start(self, step: int, schedule: str) -> None:
        if self._next < 0:
            self._next = NEVER
            self._rest(self.parts.remove)
            return
        if not self.parts.choose(step):
            self._next = self.parts.next_from(step)
            return
        self.clock.start_step(step)
        self._calls = [0] * len(self._chunks)
        self._schedules.add(schedule)
        self._while_recording.apply(memory=self.parts.watch_memory)
        self.parts.tell("begin")
        self._recording = True

    @guarded
    def _go_on(self, num_microbatches: int | None) -> None:
        if not host.rerunning():
            # Gradient accumulation by hand: one step, its microbatches go on counting.
            self.clock.offset += num_microbatches or 0
        elif self._recording:
            # Megatron repeats the step to see whether it gives the same; the first attempt is the record.
            self.parts.tell("remove")
            self._while_recording.revert()

    def schedule_failed(self) -> None:
        """The schedule raised: keep what was seen up to here."""
        self._guard.others_stopped()
        if self._recording:
            self._finish(complete=False)

    def schedule_end(self) -> None:
        """The schedule returned; without an optimizer the step ends here."""
        self.in_schedule = False
        self._tell("calls_end")
        if self._optimizer is None:
            self.optimizer_begin()
            self.optimizer_end()

    @guarded
    def microbatch_begin(self, model: Any, microbatch: int | None, store: list[Any]) -> None:
        """The forward of a microbatch starts on a chunk."""
        if not self._recording:
            return
        chunk = self._index_of(model) or 0
        number = self._calls[chunk] if microbatch is None else microbatch
        self._calls[chunk] += 1
        self.clock.moment = Moment(self.clock.offset + number, chunk)
        self._stored = len(store)
        self.parts.tell("microbatch", self.clock.moment)

    @guarded
    def microbatch_end(self, store: list[Any]) -> None:
        """The forward of a microbatch has ended; a last stage has stored what the loss function reported."""
        if self._recording and len(store) > self._stored:
            self.parts.tell("reported", store[-1], self.clock.moment)

    @alone
    def forward_begin(self, model: nn.Module) -> None:
        """A plain loop calls the model: the first call of a step begins it, each call is a microbatch."""
        if self.in_schedule:
            return
        if not self._open:
            self.schedule_begin("plain loop", None)
            self.in_schedule = False
        self.microbatch_begin(model, None, [])

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While the model runs without gradients: an evaluation in the middle of a step is not of the step."""
        self._tell("pause")
        try:
            yield
        finally:
            self._tell("resume")

    @alone
    def _tell(self, what: str) -> None:
        if self._recording:
            try:
                self.parts.tell(what)
            except Exception as error:
                self.fault(error, what)

    def step(self) -> None:
        """End the step by hand, where no optimizer was given or its step was skipped; else it changes nothing.

        Example::

            loss.backward(); reduce(model); session.step()
        """
        if self._open:
            if self._optimizer is None:
                self.optimizer_begin()
            self.optimizer_end()

    def moment(self) -> Moment:
        """Microbatch and chunk of the forward that is running."""
        return self.clock.moment

    @contextmanager
    def recomputing(self, moment: Moment | None) -> Iterator[None]:
        """While a checkpoint repeats a forward; what it computes is measured anew."""
        self.memory_changed()
        with self.clock.recomputing(moment):
            yield
        self.memory_changed()

    @guarded
    def memory_changed(self) -> None:
        """Tensors may have changed without their version counters telling."""
        self.parts.memory_changed()

    def optimizer_begin(self) -> None:
        """The outermost optimizer is about to step."""
        self._tell("before_optimizer")

    @alone
    def optimizer_end(self, result: Any = None) -> None:
        """The optimizer has stepped and returned `result`: the step is over."""
        if not self._open and not self.closed:
            self._no_schedule_seen()
        self._open = False
        self._numbers.passed()
        if self._recording:
            self._finish(complete=True, result=result)

    @guarded
    def _no_schedule_seen(self) -> None:
        lost = DISPATCHER.verify()
        if lost:
            self.voice.say(f"other code had overwritten {', '.join(lost)}; bound again", "overridden")

    @guarded
    def _finish(self, complete: bool, result: Any = None) -> None:
        if complete:
            self.parts.tell("after_optimizer", result)
        self._recording = False
        self.parts.finish(complete)
        self._steps += 1
        if not self._guard.first:
            self._next = self.parts.next_from(self.clock.step + 1)
        if self._next != self.clock.step + 1:
            # Between two recorded steps nothing is taken away only to be put back.
            self._while_recording.revert()

    # Faults and the end.

    def fault(self, error: BaseException, where: str) -> None:
        """Disarm: a fault of the kit never stops or alters training, unless `strict` asks for it."""
        # When the next step begins, the thread that trains takes away what other threads and running calls cannot.
        self._next = -1
        if self._guard.take(error, where):  # between steps there is no call that our hooks could be missing from
            self._rest(self.parts.silence if self._recording else self.parts.remove, error)

    def _rest(self, quiet: Callable[[], None], error: BaseException | None = None) -> None:
        self._recording = False
        try:
            quiet()
            self._while_recording.revert()
        except Exception as another:  # the original fault is the one to report
            self.faults.append(f"disarm: {another}")
        if not self.closed:
            self._guard.stop(error)

    def leave(self) -> None:
        """In a forked child: see nothing any more, and leave the files to the parent."""
        self.closed, self._next, self._recording = True, NEVER, False
        self._guard.forked()
        self.parts.remove()
        self._while_recording.revert()

    def close(self) -> None:
        """Write what is left, put everything back, leave the ledger. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        if self.selected:
            atexit.unregister(self.close)
            for last in (self.sleep, *[part.close for part in self.parts.all], self._write_rest, self._leave_ledger):
                try:
                    last()
                except Exception as error:
                    self.fault(error, "close")
            self._guard.stop()

    @alone
    @guarded
    def sleep(self) -> None:
        """Take everything off the model until `wake`: steps between are not seen, nor counted if no host counts."""
        if not self.selected:
            return
        if self._recording:
            self._finish(complete=False)
        if self._open:  # what is left of the step goes by unseen
            self._numbers.passed()
        self._open = self.in_schedule = False
        self.parts.remove()
        self._while_recording.revert()
        self._all_the_time.revert()

    def wake(self) -> None:
        """Put it back on. A session is made awake; one that is closed stays asleep.

        Example::

            session.sleep(); tune(model, optimizer); session.wake()
        """
        if self.selected and not self.closed:
            self._all_the_time.apply()

    def _write_rest(self) -> None:
        self.writer.close()
        for text in self.not_happened():
            self.voice.say(text, "not_happened")
        self.voice.tell(last_line(self._steps, self.directory.path))

    @property
    def steps_recorded(self) -> list[int]:
        """The steps that the dump has recorded on this rank."""
        return next((part.steps for part in self.parts.all if isinstance(part, Dumping)), [])

    def not_happened(self) -> list[str]:
        """What was asked and did not happen, as far as this rank can know."""
        return [text for part in self.parts.all for text in part.not_happened(self._numbers.last)]

    def ledger(self) -> dict[str, Any]:
        """What was asked, bound, fired and written on this rank."""
        return {
            **self.parts.ledger(),
            "asked": {"steps": self.config.steps.describe(), "ranks": self.config.ranks.describe()},
            "written": self.writer.counts.as_dict(),
            "schedules": sorted(self._schedules),
            "not_happened": self.not_happened() if self.closed else [],
            "faults": self.faults,
            "patches": [*DISPATCHER.ledger(), *self._while_recording.ledger()],
        }

    def _leave_ledger(self) -> None:
        found = facts.rank_facts(self.config, self.where, self._chunks, self.closed, self.ledger())
        self.directory.write_json(f"ranks/rank_{self.where.rank:05d}.json", found)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
