"""From the sections of a probe file to the parts of a session: the one place that knows them all."""

from __future__ import annotations

import sys

from msprobe_megatron.alerting import Alerting
from msprobe_megatron.checking import Checking
from msprobe_megatron.config import ConfigError
from msprobe_megatron.curves import LiveCurves
from msprobe_megatron.dumping import Dumping
from msprobe_megatron.flight_recorder import FlightRecorder
from msprobe_megatron.monitoring import Monitoring
from msprobe_megatron.parts import Job, Part
from msprobe_megatron.perturbing import Perturbing


def make_parts(job: Job) -> list[Part]:
    """The parts that the probe file asks for, bound to the model of `job`.

    Example::

        parts = Parts(make_parts(job))
    """
    config = job.config
    parts: list[Part] = []
    if config.replay is not None:
        # Reads a run directory, which nothing else does in training.
        from msprobe_megatron.replaying import Replaying

        parts.append(Replaying(job, config.replay))
    if config.dump is not None:
        parts.append(Dumping(job, config.dump))
    # Before the monitor, whose alerts ask for what was kept up to the step they are about.
    recorder = FlightRecorder(job, config.recorder) if config.recorder is not None else None
    if recorder is not None:
        parts.append(recorder)
    if config.monitor is not None:
        parts.append(Monitoring(job, config.monitor))
        tensorboard = "tensorboard" in config.monitor.format
        if tensorboard or "wandb" in sys.modules:
            parts.append(LiveCurves(job, tensorboard=tensorboard))
    if config.perturb is not None:
        parts.append(Perturbing(job, config.perturb))
    alerts = config.monitor.alerts if config.monitor is not None else ()
    if alerts or config.checks is not None:
        alerting = Alerting(job, alerts, recorder.keep if recorder is not None else None)
        parts.append(alerting)
        if config.checks is not None:
            parts.append(Checking(job, config.checks, alerting))
    if not parts:
        raise ConfigError(
            f"{config.source}: asks for nothing; accepted: a section such as dump that says what to record"
        )
    return parts
