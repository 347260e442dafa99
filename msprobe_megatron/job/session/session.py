"""One probed job: `attach`, which every integration and the launch path end in, set-up, sleep, the end, the ledger.

What happens in between, step by step, is in `steps`. Between recorded steps a session keeps two wrappers (schedule and
`optimizer.step`) that compare one integer; hooks exist only while a step is recorded.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from msprobe_megatron.config import ConfigError, ProbeConfig, load
from msprobe_megatron.config.flags import Flags, from_command_line
from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.control import Control
from msprobe_megatron.job.features.alerts.feature import AlertsFeature
from msprobe_megatron.job.features.checks.feature import ChecksFeature
from msprobe_megatron.job.features.checks.gradient_products import GradientProductFeature
from msprobe_megatron.job.features.checks.update_samples import UpdateSampleFeature
from msprobe_megatron.job.features.dump.feature import DumpFeature
from msprobe_megatron.job.features.feature import Feature, Features, JobContext, Seen
from msprobe_megatron.job.features.monitor.feature import MonitorFeature
from msprobe_megatron.job.features.monitor.live_curves import LiveCurves
from msprobe_megatron.job.features.perturb.feature import PerturbFeature
from msprobe_megatron.job.features.recorder.feature import RecorderFeature
from msprobe_megatron.job.measure import native
from msprobe_megatron.job.messages import Messages, last_line
from msprobe_megatron.job.record.writer import Writer
from msprobe_megatron.job.session import run_facts
from msprobe_megatron.job.session.faults import REFUSALS, FaultGuard, exclusive, guarded
from msprobe_megatron.job.session.passes import PassEvents
from msprobe_megatron.job.session.patch_scopes import ROUTER, SessionPatches, StepPatches
from msprobe_megatron.job.session.steps import Lifecycle, State, StepCounter
from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.topology import coordinates, names
from msprobe_megatron.topology.expert_grid import placed


class Session(PassEvents):
    """One probed model. Made by `attach`; ends with `close` or with the process."""

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
        # Two models of a process may begin at different steps.
        self.config = config = replace(config, steps=config.steps.anew())
        self.clock = Clock()
        self.where = _place(chunks, groups)
        config.ranks.check(self.where.world, self.where.sizes())
        self.selected = config.ranks.selects(self.where.rank, self.where.position())
        self._lifecycle = Lifecycle(State.IDLE if self.selected else State.SLEEPING)
        self._steps, self._recorded = StepCounter(step), 0
        self.forward_only, self._by_hand = config.forward_passes != "off", config.forward_passes == "step"
        # An optimizer beside forward-only passes says that calls with gradients are training; it ends no step.
        self._chunks, self._optimizer = list(chunks), None if self.forward_only else optimizer
        self._trained_by = optimizer
        self._chunk_of = {id(m): i for i, chunk in enumerate(chunks) for m in (chunk, names.unwrap(chunk))}
        self._schedules, self._stops = set(), []
        self.directory = RunDirectory.create(_output(config, tag))
        self.messages = Messages(self.directory, self.where.rank)
        self.faults = self.messages.faults
        self._guard = FaultGuard(self.messages, config.strict)
        if self.selected or self.where.rank == 0:
            # Before anything is written: a directory that holds a run is refused, never mixed.
            self.directory.claim_rank(self.where.rank, coordinates.job_identity(self.where.world))
        self.features = Features([])
        try:
            self._set_up(arguments, tag)
        except REFUSALS:
            raise
        except Exception as error:  # an error of the kit, not of the probe file
            self._guard.take(error, "attach")
            self.close()

    def _set_up(self, arguments: Any, tag: str | None) -> None:
        config, report = self.config, self.messages.report
        if self.where.rank == 0:
            run = run_facts.run_facts(config, self.where, self._chunks, arguments, tag, self._trained_by)
            self.directory.write_json("run.json", run)
            for text in run["unseen"]:
                report(text, "unseen")
        if not self.selected:
            return
        native.load(tell=self.messages.log)
        disk = config.limits.disk
        self.writer = Writer(
            self.directory,
            {"rank": self.where.rank, **self.where.position()},
            config.limits.host_memory // 2,
            lambda error: self.fault(error, "writer"),
            disk_bytes=None if disk is None else disk // self.where.world,
            on_limit=lambda text: report(text, "drop"),
        )
        plain = coordinates.parallel_state() is None
        self._step_patches = StepPatches(self, plain=plain)
        self._session_patches = SessionPatches(
            self, self._chunks, self._chunk_of, self._trained_by, plain=plain, forward_only=self.forward_only
        )
        self._control = Control(self.directory.path, self.where, config.ranks, report)
        job = JobContext(
            config=config,
            chunks=self._chunks,
            optimizer=self._optimizer,
            clock=self.clock,
            where=self.where,
            directory=self.directory,
            fault=self.fault,
            submit=self.writer.submit,
            say=report,
            request=self._control.request,
            arguments=arguments,
        )
        self.features = Features(make_features(job))
        self._write_ledger()
        self._session_patches.apply()
        self._next_step = self.features.next_from(0)
        atexit.register(self.close)
        self.messages.log(f"{self.features.describe()} into {self.directory.path}")

    # The end.

    def leave(self) -> None:
        """In a forked child: observe nothing any more, and leave the files to the parent."""
        self._lifecycle = Lifecycle(State.CLOSED)  # a new one: another thread of the parent may hold the lock
        self._guard.after_fork()
        self.features.remove()
        self._step_patches.revert()

    def close(self) -> None:
        """Write what is left, restore everything, write the ledger. Idempotent."""
        with self._guard.step_lock:
            before = self._move(State.CLOSED)
        if before is State.CLOSED or not self.selected:
            return
        atexit.unregister(self.close)
        last_calls = [feature.close for feature in self.features.all]
        for call in (lambda: self._detach(before), *last_calls, self._write_rest, self._write_ledger):
            try:
                call()
            except Exception as error:
                self.fault(error, "close")
        self._guard.raise_if_strict()

    @guarded
    def sleep(self) -> None:
        """Take everything off the model until `wake`: steps between are not seen, nor counted if no host counts."""
        if self.selected:
            with self._guard.step_lock:
                self._detach(self._move(State.SLEEPING))

    @exclusive
    @guarded
    def _detach(self, before: State) -> None:
        if before is State.RECORDING:
            self._tell_stop(None)
            self._finish(self.state, complete=False)
        if before in (State.IN_STEP, State.RECORDING):  # the rest of the step is not seen
            self._steps.end()
        self.in_schedule = False
        self.features.remove()
        self._step_patches.revert()
        self._session_patches.revert()

    def wake(self) -> None:
        """Undo `sleep`; does nothing once the session is closed."""
        if self.selected and not self.closed:
            if self.state is State.SLEEPING:
                self._move(State.IDLE)
            self._session_patches.apply()

    def _write_rest(self) -> None:
        self.writer.close()
        for text in self.not_happened():
            if text not in self._stops:
                self.messages.report(text, "not_happened")
        self.messages.log(last_line(self._recorded, self.directory.path))

    @property
    def steps_recorded(self) -> list[int]:
        """The steps that the dump has recorded on this rank."""
        return next((feature.steps for feature in self.features.all if isinstance(feature, DumpFeature)), [])

    def not_happened(self) -> list[str]:
        """What was requested and did not happen, as far as this rank can know."""
        seen = Seen(self._steps.first, self._steps.last)
        missed = [text for feature in self.features.all for text in feature.not_happened(seen)]
        return [*self._stops, *missed]

    def ledger(self) -> dict[str, Any]:
        """What was requested, bound, fired and written on this rank."""
        return {
            **self.features.ledger(),
            "asked": {"steps": self.config.steps.describe(), "ranks": self.config.ranks.describe()},
            "written": self.writer.counts.as_dict(),
            "schedules": sorted(self._schedules),
            "not_happened": self.not_happened() if self.closed else [],
            "faults": self.faults,
            "patches": [*ROUTER.ledger(), *self._step_patches.ledger()],
        }

    def _write_ledger(self) -> None:
        found = run_facts.rank_facts(self.config, self.where, self._chunks, self.closed, self.ledger())
        self.directory.write_json(f"ranks/rank_{self.where.rank:05d}.json", found)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_ATTACHED: WeakKeyDictionary[nn.Module, Session] = WeakKeyDictionary()


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any = None,
    config: ProbeConfig | Flags | str | Path | None = None,
    *,
    tag: str | None = None,
    step: int | Callable[[], int] | None = None,
    groups: Any = None,
    arguments: Any = None,
    forward_only: bool | None = None,
) -> Session:
    """Probe a model (one module or Megatron's list of chunks) and its outermost optimizer. No communication.

    `tag` names a sub-directory of the output: each of several models in a process has its own. `step` is the number
    of the first step, or a function that returns the number of the step that begins; by default Megatron's own
    iteration, else a counter. `groups` gives the process groups where they are not Megatron's global ones: a mapping
    or an object with any of tp, pp, dp, cp, ep. `forward_only` records passes without backward, each call of the model
    as a step, whatever the probe file says. Raises `ConfigError` if the probe file does not fit the job.
    """
    if config is None:
        config = from_command_line()
    if isinstance(config, Flags):
        config = config.load_config()
    elif not isinstance(config, ProbeConfig):
        config = load(config)
    if forward_only is not None and forward_only != (config.forward_passes != "off"):
        config = replace(config, forward_passes="call" if forward_only else "off")
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    # A script that attaches by itself and is started through `msprobe_megatron.run` is attached already.
    known = _ATTACHED.get(names.unwrap(chunks[0])) if chunks else None
    if known is not None and not known.closed and known.directory.path.resolve() == _output(config, tag).resolve():
        return known
    changes = _reproduced(chunks, optimizer, config, groups)
    session = Session(chunks, optimizer, config, tag=tag, step=step, groups=groups, arguments=arguments)
    for text in changes:
        session.messages.log(f"reproduce: {text}")
    if chunks:
        _ATTACHED[names.unwrap(chunks[0])] = session
    return session


def _reproduced(chunks: Sequence[nn.Module], optimizer: Any, config: ProbeConfig, groups: Any) -> list[str]:
    """Apply the `reproduce` section, before anything is observed; returns what was changed."""
    if config.reproduce is None:
        return []
    from msprobe_megatron.job.features.reproduce import reproduce

    return reproduce(chunks, optimizer, config.reproduce, _place(chunks, groups), config.source)


def _place(chunks: Sequence[nn.Module], groups: Any) -> coordinates.Coordinates:
    return placed(coordinates.current(), chunks) if groups is None else coordinates.from_groups(groups)


def _output(config: ProbeConfig, tag: str | None) -> Path:
    return Path(config.output) / tag if tag else Path(config.output)


def make_features(job: JobContext) -> list[Feature]:
    """The features that the probe file configures, bound to the model of `job`."""
    config = job.config
    features: list[Feature] = []
    if config.replay is not None:
        # Imported on demand: it reads a run directory, which nothing else does in training.
        from msprobe_megatron.job.features.replay.feature import ReplayFeature

        features.append(ReplayFeature(job, config.replay))
    if config.dump is not None:
        features.append(DumpFeature(job, config.dump))
    # Before the monitor: its alerts write out what the recorder kept up to their step.
    recorder = RecorderFeature(job, config.recorder) if config.recorder is not None else None
    if recorder is not None:
        features.append(recorder)
    if config.monitor is not None:
        features.append(MonitorFeature(job, config.monitor))
        tensorboard = "tensorboard" in config.monitor.format
        if tensorboard or "wandb" in sys.modules:
            features.append(LiveCurves(job, tensorboard=tensorboard))
    if config.perturb is not None:
        features.append(PerturbFeature(job, config.perturb))
    alerts = config.monitor.alerts if config.monitor is not None else ()
    if alerts or config.checks is not None:
        alerting = AlertsFeature(job, alerts, recorder.keep if recorder is not None else None)
        features.append(alerting)
        if config.checks is not None:
            features.append(ChecksFeature(job, config.checks, alerting))
            if config.checks.update and job.optimizer is not None:
                features.append(UpdateSampleFeature(job, config.checks))
            if config.checks.products and job.optimizer is not None:
                features.append(GradientProductFeature(job, config.checks))
    if not features:
        raise ConfigError(
            f"{config.source}: no section configures a feature; accepted: a section such as dump: {{level: L0}}"
        )
    return features
