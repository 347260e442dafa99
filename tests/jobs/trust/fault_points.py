"""Where an exception is thrown inside the kit: one line a place, and a job in which that place is reached.

A new site, probe or rule gets a line here; `test_job_survives_faults.py` does the rest.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.jobs.trust.jobs import EVERYTHING

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TP2 = "--tensor-model-parallel-size 2"


@dataclass(frozen=True)
class FaultPoint:
    """`target` is "module:function" or "module:Class.method" below the package.

    The exception is thrown from the call number `after` on whose arguments hold `given` (any call if it is None), on
    rank `rank` (every rank if it is None). Where a fault switches off only a part of the kit, `off` is what is
    reported; everywhere else it disables the whole probe. `order` is put into control.json after the first step.
    """

    target: str
    probe: str = "dump: {level: L0}"
    flags: str = ""
    world: int = 1
    after: int = 0
    given: str | None = None
    rank: int | None = None
    off: str = ""
    order: str = ""


_L1, _MIX = "dump: {level: L1}", "dump: {level: mix}"
_BACKWARD = "dump: {level: L1, data_mode: [backward]}"
_ALERTS = "monitor: {alerts: [nonfinite, spike]}"
_CURVES = "monitor: {format: [parquet, tensorboard]}"
RULES = {
    "nonfinite": "NonFinite",
    "limit": "Limit",
    "custom": "Custom",
    "spike": "Spike",
    "vanish": "Vanish",
    "dead_expert": "DeadExpert",
    "replica": "Replica",
}

FAULT_POINTS = {
    # Sites.
    "module hook": FaultPoint("job.sites.module.modules:ModuleSite._see", after=30),
    "module places": FaultPoint("job.sites.module.modules:ModuleSite._make_places", after=30),
    "module gradient": FaultPoint("job.features.dump.probe:DumpProbe.see", given="backward", after=7),
    "module install": FaultPoint("job.sites.module.modules:ModuleSite.install", after=1),
    "call stack": FaultPoint("job.sites.module.modules:call_stack"),
    "API call": FaultPoint("job.sites.calls.api:ApiSite._call_of", _L1, after=30),
    "API input": FaultPoint("job.sites.calls.naming:Places.__missing__", _L1, given="0", after=30),
    "API output": FaultPoint("job.sites.calls.naming:Places.__missing__", _MIX, given="", after=30),
    "API gradient": FaultPoint("job.features.dump.probe:DumpProbe.see", _L1, given="backward", after=7),
    "API gradient hooks": FaultPoint("job.sites.calls.naming:Places.__missing__", _BACKWARD, after=30),
    "API name": FaultPoint("job.sites.calls.api:name_of", _L1, after=3),
    "API install": FaultPoint("job.sites.calls.api:ApiSite.install", _L1, after=1),
    "frames": FaultPoint("job.sites.calls.naming:ModuleFrames.running", _L1, after=9),
    "frames in a recomputation": FaultPoint(
        "job.sites.calls.naming:ModuleFrames.running", _MIX, RECOMPUTE, given="recompute"
    ),
    "API call in a recomputation": FaultPoint(
        "job.features.dump.probe:DumpProbe.see", _L1, RECOMPUTE, given="recompute"
    ),
    "optimizer": FaultPoint("job.sites.training.optimizer:OptimizerSite.collect", after=1),
    "optimizer's gradients": FaultPoint("job.sites.training.optimizer:reduced_range", after=5),
    "loss": FaultPoint("job.sites.training.losses:LossSite.report", after=2),
    # What the patches tell the session.
    "which model": FaultPoint("job.session.patch_scopes:Router._find", after=1),
    "which microbatch": FaultPoint("job.session.steps:StepEvents._index_of", after=5),
    "which step": FaultPoint("job.session.steps:StepCounter.begin", after=2),
    "which phase": FaultPoint("job.clock:Clock.calling", after=20),
    "which phase of an API call": FaultPoint("job.clock:Clock.calling", _L1, after=40),
    "binding the patches of a step": FaultPoint("job.patching.patch_set:PatchSet.apply", after=3),
    "taking the patches of a step away": FaultPoint("job.patching.patch_set:PatchSet.revert", after=1),
    "recomputation": FaultPoint("job.features.feature:Features.memory_changed", _MIX, RECOMPUTE, after=1),
    "collective": FaultPoint("job.features.feature:Features.memory_changed", _MIX, TP2, world=2, after=9, rank=1),
    # Probe, measure, record.
    "measure": FaultPoint(
        "job.measure.measurer:Measurer.__call__", "dump: {level: L0, task: tensor, digest: true}", after=50
    ),
    "what rows have in common": FaultPoint(
        "job.features.dump.probe:DumpProbe._describe", "dump: {digest: true}", after=50
    ),
    "slot": FaultPoint("job.record.slots:SlotTable.take", "dump: {digest: true, task: tensor}", after=50),
    "room for slots": FaultPoint("job.record.slots:SlotTable.grow"),
    "end of a step": FaultPoint("job.features.dump.probe:DumpProbe.finish", after=1),
    "structure": FaultPoint("job.sites.module.modules:ModuleSite.structure", after=1),
    "writer: rows": FaultPoint("job.record.step_files:RecordsFile.content", _MIX),
    "writer: sites": FaultPoint("job.record.step_files:SitesFile.write"),
    "writer: file": FaultPoint("run_directory.directory:RunDirectory.write_table"),
    "writer of one rank": FaultPoint("job.record.step_files:RecordsFile.content", _L1, TP2, world=2, rank=1),
    # Recorder and checks; a rank whose probe is disabled must not be waited for by the others.
    "recorder step": FaultPoint("job.features.recorder.feature:RecorderFeature._take", "recorder: {}", after=1),
    "recorder inspects": FaultPoint("job.features.recorder.feature:RecorderFeature.inspect", "recorder: {}"),
    "check of one rank": FaultPoint(
        "job.features.checks.feature:ChecksFeature._member", "checks: {every: 1}", TP2, world=2, after=1, rank=1
    ),
    "check of communication": FaultPoint(
        "job.features.checks.collectives:CollectiveTaker._completed",
        "checks: {collectives: true, every: 1}",
        TP2,
        world=2,
        after=5,
        rank=1,
    ),
    # Monitor, checks, recorder, perturb: with all of them on.
    "monitor: hook": FaultPoint("job.features.monitor.probe:MonitorProbe.see", EVERYTHING, after=20),
    "monitor: gradient": FaultPoint(
        "job.features.monitor.probe:MonitorProbe.see", EVERYTHING, given="backward", after=5
    ),
    "monitor: before the optimizer": FaultPoint(
        "job.features.monitor.feature:MonitorFeature.before_optimizer", EVERYTHING, after=1
    ),
    "monitor: after the optimizer": FaultPoint(
        "job.features.monitor.feature:MonitorFeature.after_optimizer", EVERYTHING, after=1
    ),
    "monitor: end of a step": FaultPoint("job.features.monitor.probe:MonitorProbe.finish", EVERYTHING, after=1),
    "monitor: metric": FaultPoint("job.sites.training.metrics:Metrics.attention", EVERYTHING, after=1),
    "communication begins": FaultPoint(
        "job.sites.comm.collectives:CommSite._begins", EVERYTHING, TP2, world=2, after=5, rank=1
    ),
    "communication ends": FaultPoint(
        "job.sites.comm.collectives:CommSite._completed", EVERYTHING, TP2, world=2, after=5, rank=1
    ),
    "recorder": FaultPoint(
        "job.features.recorder.feature:RecorderFeature.finish", "recorder: {keep_steps: 2}", after=1
    ),
    "checks of one rank": FaultPoint(
        "job.features.checks.feature:ChecksFeature.before_optimizer", EVERYTHING, TP2, world=2, after=1, rank=1
    ),
    "perturb: begin": FaultPoint("job.features.perturb.feature:PerturbFeature.begin", EVERYTHING, after=1),
    "perturb: end of a step": FaultPoint("job.features.perturb.feature:PerturbFeature.finish", EVERYTHING, after=1),
    "perturb: name of a call": FaultPoint("job.sites.calls.rerunnable:name_of", EVERYTHING, after=3),
    "perturb: which call": FaultPoint("job.features.perturb.select.selecting:Selection.call", EVERYTHING, after=3),
    "perturb: examination": FaultPoint("job.features.perturb.examiner:CheckRunner.examine", EVERYTHING, after=3),
    "perturb: rows": FaultPoint("job.features.perturb.feature:row_of", EVERYTHING),
    "monitor: optimizer's state": FaultPoint(
        "job.sites.training.optimizer_states:OptimizerStates.after_step", EVERYTHING, after=1
    ),
    "monitor: inside the optimizer": FaultPoint(
        "job.sites.training.optimizer_states:OptimizerStates._keep", EVERYTHING, after=1
    ),
    "monitor: reduced gradients": FaultPoint("job.sites.training.gradients:GradientSite.reduced", EVERYTHING, after=1),
    "monitor: inputs": FaultPoint("job.sites.training.progress:Arguments._look", EVERYTHING, after=3),
    "monitor: throughput": FaultPoint("job.sites.training.progress:Throughput.finish", EVERYTHING, after=1),
    "monitor: file": FaultPoint("job.record.monitor_files:steps_table", EVERYTHING),
    # Alerts, in the writer thread: a rule is off alone, what all rules need is a fault of the kit.
    "alerts: columns": FaultPoint("job.features.alerts.feature:Columns", _ALERTS),
    "alerts: series": FaultPoint("job.features.alerts.series:SeriesNumbers.of", _ALERTS),
    "alerts: history": FaultPoint("job.features.alerts.series:Steps.add", _ALERTS),
    "alerts: event": FaultPoint(
        "job.features.alerts.feature:_event",
        "monitor: {alerts: [{rule: limit, threshold: 1.0e-9}]}",
        off="alert limit is off after an internal error",
    ),
    "recorder: writes": FaultPoint(
        "job.features.recorder.feature:RecorderFeature._write",
        "monitor: {alerts: [{rule: limit, threshold: 1.0e-9}]}\nrecorder: {}",
        off="alert limit is off after an internal error",
    ),
    "TensorBoard: step": FaultPoint("job.features.monitor.live_curves:LiveCurves.saw", _CURVES),
    "TensorBoard: file": FaultPoint("job.features.monitor.live_curves:LiveCurves._write", _CURVES),
    "TensorBoard: last picture": FaultPoint("job.features.monitor.live_curves:LiveCurves._draw", _CURVES),
    # Checks, in a thread of their own: only they are off.
    "checks: thread": FaultPoint(
        "job.features.checks.comparer:Comparer._check", "checks: {every: 1}", TP2, world=2, rank=1, off="checks are off"
    ),
    # Orders from outside.
    "control file: look": FaultPoint(
        "run_directory.control_file:ControlFile.changed", after=1, off="is no longer read"
    ),
    "control file: read": FaultPoint(
        "run_directory.control_file:ControlFile.read", order='{"next": 1}', off="is no longer read"
    ),
    "control file: parse": FaultPoint("job.control:parse_order", order='{"next": 1}', off="is no longer read"),
    "size estimate": FaultPoint("job.features.size_estimate:SizeEstimate.report"),
    # Beginning and end of a run.
    "attach": FaultPoint("job.session.session:make_features"),
    "facts": FaultPoint("job.session.run_facts:run_facts"),
    "close": FaultPoint("job.record.writer:Writer.close"),
    "ledger": FaultPoint("job.session.session:Session.not_happened"),
}


def break_at(point: FaultPoint) -> None:
    """Make this process throw at `point`."""
    if point.rank is not None and os.environ.get("RANK", "0") != str(point.rank):
        return
    module, _, path = point.target.partition(":")
    owner: Any = importlib.import_module(f"msprobe_megatron.{module}")
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, _broken(vars(owner)[name], point))


def _broken(original: Callable[..., Any], point: FaultPoint) -> Callable[..., Any]:
    count = itertools.count()

    def broken(*args: Any, **kwargs: Any) -> Any:
        meant = point.given is None or any(isinstance(value, str) and value == point.given for value in args)
        if meant and next(count) >= point.after:
            raise KeyError("injected")
        return original(*args, **kwargs)

    return broken
