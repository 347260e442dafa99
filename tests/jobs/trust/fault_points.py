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

from tests.trust.jobs import EVERYTHING

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TP2 = "--tensor-model-parallel-size 2"


@dataclass(frozen=True)
class FaultPoint:
    """`target` is "module:function" or "module:Class.method" below the package.

    The exception is thrown from the call number `after` on whose arguments hold `given` (any call if it is None), on
    rank `rank` (every rank if it is None). Where a fault switches off only what has it, `off` are the words for that;
    everywhere else the kit disarms. `order` is put into control.json after the first step.
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
    "module hook": FaultPoint("sites.modules:ModuleSite._see", after=30),
    "module places": FaultPoint("sites.modules:ModuleSite._make_places", after=30),
    "module gradient": FaultPoint("probes.dump:DumpProbe.see", given="backward", after=7),
    "module install": FaultPoint("sites.modules:ModuleSite.install", after=1),
    "call stack": FaultPoint("sites.modules:call_stack"),
    "API call": FaultPoint("sites.api:ApiSite._call_of", _L1, after=30),
    "API input": FaultPoint("sites.api:_Places.__missing__", _L1, given="0", after=30),
    "API output": FaultPoint("sites.api:_Places.__missing__", _MIX, given="", after=30),
    "API gradient": FaultPoint("probes.dump:DumpProbe.see", _L1, given="backward", after=7),
    "API gradient hooks": FaultPoint("sites.api:_Places.__missing__", _BACKWARD, after=30),
    "API name": FaultPoint("sites.api:name_of", _L1, after=3),
    "API install": FaultPoint("sites.api:ApiSite.install", _L1, after=1),
    "frames": FaultPoint("sites.frames:ModuleFrames._pass", _L1, after=9),
    "frames in a recomputation": FaultPoint("sites.frames:ModuleFrames._pass", _MIX, RECOMPUTE, given="recompute"),
    "API call in a recomputation": FaultPoint("probes.dump:DumpProbe.see", _L1, RECOMPUTE, given="recompute"),
    "optimizer": FaultPoint("sites.optimizer:OptimizerSite.collect", after=1),
    "optimizer's gradients": FaultPoint("sites.optimizer:reduced_range", after=5),
    "loss": FaultPoint("sites.losses:LossSite.report", after=2),
    # What the patches tell the session.
    "which model": FaultPoint("dispatch:Dispatcher._find", after=1),
    "which microbatch": FaultPoint("session:Session._index_of", after=5),
    "which step": FaultPoint("step_numbers:StepNumbers.coming", after=2),
    "which phase": FaultPoint("clock:Clock.calling", after=20),
    "which phase of an API call": FaultPoint("clock:Clock.calling", _L1, after=40),
    "binding the patches of a step": FaultPoint("patching:PatchSet.apply", after=3),
    "taking the patches of a step away": FaultPoint("patching:PatchSet.revert", after=1),
    "recomputation": FaultPoint("parts:Parts.memory_changed", _MIX, RECOMPUTE, after=1),
    "collective": FaultPoint("parts:Parts.memory_changed", _MIX, TP2, world=2, after=9, rank=1),
    # Probe, measure, record.
    "measure": FaultPoint(
        "measure.measurer:Measurer.__call__", "dump: {level: L0, task: tensor, digest: true}", after=50
    ),
    "what rows have in common": FaultPoint("probes.dump:DumpProbe._describe", "dump: {digest: true}", after=50),
    "slot": FaultPoint("record.slots:SlotTable.take", "dump: {digest: true, task: tensor}", after=50),
    "room for slots": FaultPoint("record.slots:SlotTable.grow"),
    "end of a step": FaultPoint("probes.dump:DumpProbe.finish", after=1),
    "structure": FaultPoint("sites.modules:ModuleSite.structure", after=1),
    "writer: rows": FaultPoint("record.records_file:RecordsFile.content", _MIX),
    "writer: sites": FaultPoint("record.batches:SitesFile.write"),
    "writer: file": FaultPoint("record.directory:RunDirectory.write_table"),
    "writer of one rank": FaultPoint("record.records_file:RecordsFile.content", _L1, TP2, world=2, rank=1),
    # Recorder and checks; a rank that is disarmed must not be waited for by the others.
    "recorder step": FaultPoint("flight_recorder:FlightRecorder._take", "recorder: {}", after=1),
    "recorder looks": FaultPoint("flight_recorder:FlightRecorder.look", "recorder: {}"),
    "check of one rank": FaultPoint("checking:Checking._member", "checks: {}", TP2, world=2, after=1, rank=1),
    "check of communication": FaultPoint(
        "collective_checks:CollectiveTaker._completed", "checks: {collectives: true}", TP2, world=2, after=5, rank=1
    ),
    # Monitor, checks, recorder, perturb: with all of them on.
    "monitor: hook": FaultPoint("probes.monitor:MonitorProbe.see", EVERYTHING, after=20),
    "monitor: gradient": FaultPoint("probes.monitor:MonitorProbe.see", EVERYTHING, given="backward", after=5),
    "monitor: before the optimizer": FaultPoint("monitoring:Monitoring.before_optimizer", EVERYTHING, after=1),
    "monitor: after the optimizer": FaultPoint("monitoring:Monitoring.after_optimizer", EVERYTHING, after=1),
    "monitor: end of a step": FaultPoint("probes.monitor:MonitorProbe.finish", EVERYTHING, after=1),
    "monitor: metric": FaultPoint("probes.metrics:Metrics.attention", EVERYTHING, after=1),
    "communication begins": FaultPoint("sites.comm:CommSite._begins", EVERYTHING, TP2, world=2, after=5, rank=1),
    "communication ends": FaultPoint("sites.comm:CommSite._completed", EVERYTHING, TP2, world=2, after=5, rank=1),
    "recorder": FaultPoint("flight_recorder:FlightRecorder.finish", "recorder: {keep_steps: 2}", after=1),
    "checks of one rank": FaultPoint("checking:Checking.before_optimizer", EVERYTHING, TP2, world=2, after=1, rank=1),
    "perturb: begin": FaultPoint("perturbing:Perturbing.begin", EVERYTHING, after=1),
    "perturb: end of a step": FaultPoint("perturbing:Perturbing.finish", EVERYTHING, after=1),
    "perturb: name of a call": FaultPoint("sites.calls:name_of", EVERYTHING, after=3),
    "perturb: which call": FaultPoint("probes.perturb.selecting:Selection.call", EVERYTHING, after=3),
    "perturb: examination": FaultPoint("probes.perturb.examiner:Examiner.examine", EVERYTHING, after=3),
    "perturb: rows": FaultPoint("probes.perturb.batch:_row", EVERYTHING),
    "monitor: optimizer's state": FaultPoint("sites.optimizer_states:OptimizerStates.after_step", EVERYTHING, after=1),
    "monitor: inside the optimizer": FaultPoint("sites.optimizer_states:OptimizerStates._keep", EVERYTHING, after=1),
    "monitor: reduced gradients": FaultPoint("sites.gradients:GradientSite.reduced", EVERYTHING, after=1),
    "monitor: inputs": FaultPoint("sites.progress:Arguments._look", EVERYTHING, after=3),
    "monitor: throughput": FaultPoint("sites.progress:Throughput.finish", EVERYTHING, after=1),
    "monitor: file": FaultPoint("record.monitor:steps_table", EVERYTHING),
    # Alerts, in the writer thread: a rule is off alone, what all rules need is a fault of the kit.
    "alerts: columns": FaultPoint("probes.alerts.watch:Columns", _ALERTS),
    "alerts: series": FaultPoint("probes.alerts.seen:SeriesNumbers.of", _ALERTS),
    "alerts: history": FaultPoint("probes.alerts.history:Steps.add", _ALERTS),
    "alerts: event": FaultPoint(
        "probes.alerts.watch:_event",
        "monitor: {alerts: [{rule: limit, threshold: 1.0e-9}]}",
        off="alert limit is off after a fault",
    ),
    "recorder: writes": FaultPoint(
        "flight_recorder:FlightRecorder._write",
        "monitor: {alerts: [{rule: limit, threshold: 1.0e-9}]}\nrecorder: {}",
        off="alert limit is off after a fault",
    ),
    "TensorBoard: step": FaultPoint("curves:LiveCurves.saw", _CURVES),
    "TensorBoard: file": FaultPoint("curves:LiveCurves._write", _CURVES),
    "TensorBoard: last picture": FaultPoint("curves:LiveCurves._draw", _CURVES),
    # Checks, in a thread of their own: only they are off.
    "checks: thread": FaultPoint(
        "exchanging:Comparer._check", "checks: {}", TP2, world=2, rank=1, off="checks are off"
    ),
    # Orders from outside.
    "control file: look": FaultPoint("record.control_file:ControlFile.changed", after=1, off="not looked at any more"),
    "control file: read": FaultPoint(
        "record.control_file:ControlFile.read", order='{"next": 1}', off="not looked at any more"
    ),
    "control file: parse": FaultPoint("control:parse_order", order='{"next": 1}', off="not looked at any more"),
    "announcement": FaultPoint("announcing:Announcer.say"),
    # Beginning and end of a run.
    "attach": FaultPoint("session:make_parts"),
    "facts": FaultPoint("facts:run_facts"),
    "close": FaultPoint("record.writer:Writer.close"),
    "ledger": FaultPoint("session:Session.not_happened"),
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
