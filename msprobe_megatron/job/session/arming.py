"""Arming: everything that has to happen before Megatron is imported.

Reads the kit's own flags, validates the probe file (an invalid one ends the job here, with one line on one rank),
chooses the device backend, and registers callbacks with the import system. The rest waits until model and optimizer
exist.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from msprobe_megatron.config import ProbeConfig
from msprobe_megatron.config.flags import Flags, from_command_line
from msprobe_megatron.job import devices
from msprobe_megatron.job.messages import warn
from msprobe_megatron.job.patching.patch_set import PatchSet, declared, host_version, when_imported
from msprobe_megatron.job.session.faults import REFUSALS
from msprobe_megatron.run_directory.directory import RunDirectoryError, RunTaken
from msprobe_megatron.topology.coordinates import environment_number, environment_rank

_armed: Armed | None = None


class Armed:
    """A process in which the kit waits for model and optimizer."""

    def __init__(self, flags: Flags, config: ProbeConfig | None) -> None:
        self.flags, self.config = flags, config
        self.session: Any = None
        self._in_setup = False
        if config is not None:
            atexit.register(self._never_attached)
        self.patches = PatchSet(
            [p for p in declared("arguments") if config is not None or p.id.startswith("arguments.")], self
        )
        for module in {patch.targets[0].partition(":")[0] for patch in (e.patch for e in self.patches.entries)}:
            when_imported(module, lambda module: self.patches.apply())

    def model_ready(self, model: Any, optimizer: Any) -> None:
        """Model chunks and optimizer exist: attach, once."""
        if self.session is not None or self.config is None:
            return
        from msprobe_megatron.job.session.session import attach

        try:
            self.session = attach(model, optimizer, self.config)
        except REFUSALS as error:
            # An elastic job that lost a node must not die because its first attempt left a run directory.
            restarted = environment_number("TORCHELASTIC_RESTART_COUNT") > 0
            atexit.unregister(self._never_attached)
            if not (restarted and isinstance(error, RunTaken)) or self.config.strict:
                refuse(error)
            if environment_rank() == 0:
                warn(f"{error}; this is a restart: training continues without the probe")
        except Exception as error:
            # An error of the kit, not of the probe file: train as if it were not there.
            if self.config.strict:
                raise
            atexit.unregister(self._never_attached)
            warn(
                f"could not attach: {type(error).__name__}: {error};"
                f" training continues without the probe (megatron-core: {host_version()})",
                environment_rank(),
            )

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """While Megatron-LM builds model and optimizer; `model_ready` follows when its checkpoint is loaded."""
        self._in_setup = True
        try:
            yield
        finally:
            self._in_setup = False

    def optimizer_ready(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Attach point for scripts that call `get_megatron_optimizer` directly."""
        if not self._in_setup:
            self.model_ready(chunks, optimizer)

    def _never_attached(self) -> None:
        if self.session is None and environment_rank() == 0:
            warn(
                "no model was attached: neither setup_model_and_optimizer nor get_megatron_optimizer was called;"
                " nothing was recorded"
            )


def arm(flags: Flags | None = None, *, install: bool = True) -> Armed:
    """Make this process ready for a model. Idempotent.

    `install` allows Megatron to be made to run on CPU, which has to happen before its import.
    """
    global _armed  # noqa: PLW0603  (one command line per process)
    if _armed is not None:
        return _armed
    flags = flags or from_command_line()
    try:
        config = _config_of(flags)
        if install and devices.select(flags.device).name == "cpu":
            from msprobe_megatron.job.devices import megatron_on_cpu

            megatron_on_cpu.install()
    except REFUSALS as error:
        refuse(error)
    _armed = Armed(flags, config)
    return _armed


def _config_of(flags: Flags) -> ProbeConfig | None:
    """The probe file; None if there is none, or if reading it failed by an error of the kit."""
    try:
        return flags.load_config() if flags.armed else None
    except REFUSALS:
        raise
    except Exception as error:
        if flags.strict:
            raise
        if environment_rank() == 0:
            text = f"{flags.config} could not be read: {type(error).__name__}: {error}"
            warn(f"{text}; training continues without the probe")
        return None


def refuse(error: Exception) -> NoReturn:
    """End the job before training with exit code 2 and one line: on rank 0, or per node about its disk."""
    of_node = isinstance(error, RunDirectoryError) and not isinstance(error, RunTaken)
    if environment_rank() == 0 or (of_node and environment_number("LOCAL_RANK") == 0):
        warn(str(error))
    raise SystemExit(2)
