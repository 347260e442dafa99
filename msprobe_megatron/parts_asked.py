"""From the sections of a probe file to the parts of a session: the one place that knows them all."""

from __future__ import annotations

from msprobe_megatron.config import ConfigError
from msprobe_megatron.dumping import Dumping
from msprobe_megatron.parts import Job, Part


def make_parts(job: Job) -> list[Part]:
    """The parts that the probe file asks for, bound to the model of `job`.

    Example::

        parts = Parts(make_parts(job))
    """
    config = job.config
    parts: list[Part] = []
    if config.dump is not None:
        parts.append(Dumping(job, config.dump))
    if not parts:
        raise ConfigError(
            f"{config.source}: asks for nothing; accepted: a section such as dump that says what to record"
        )
    return parts
