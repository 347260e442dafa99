"""Phase one: what has to happen before Megatron is imported.

Reads the kit's own copy of its flags, validates the probe file (a bad one ends the job here, with one line on one
rank), chooses the device backend, and leaves callbacks in the import system. Everything else waits until
model and optimizer exist.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from msprobe_megatron import backends
from msprobe_megatron.arguments import Flags, from_command_line
from msprobe_megatron.config import ProbeConfig
from msprobe_megatron.fault_guard import REFUSALS
from msprobe_megatron.importing import when_imported
from msprobe_megatron.patching import PatchSet, declared, host_version
from msprobe_megatron.record.directory import RunDirectoryError, RunTaken
from msprobe_megatron.topology.coordinates import environment_number, environment_rank

CANNOT = REFUSALS
_armed: Armed | None = None


class Armed:
    """A process in which the kit waits for a model."""

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
        from msprobe_megatron.attaching import attach

        try:
            self.session = attach(model, optimizer, self.config)
        except CANNOT as error:
            # An elastic job that lost a node must not die because its first attempt left a record.
            restarted = environment_number("TORCHELASTIC_RESTART_COUNT") > 0
            atexit.unregister(self._never_attached)
            if not (restarted and isinstance(error, RunTaken)) or self.config.strict:
                refuse(error)
            if environment_rank() == 0:
                print(f"msprobe: {error}; this is a restart: training goes on unobserved", file=sys.stderr, flush=True)
        except Exception as error:
            # A fault of the kit, not of what was asked: training goes on as if it were not there.
            if self.config.strict:
                raise
            atexit.unregister(self._never_attached)
            print(
                f"msprobe [rank {environment_rank()}]: could not attach: {type(error).__name__}: {error};"
                f" training goes on unobserved (megatron-core: {host_version()})",
                file=sys.stderr,
                flush=True,
            )

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """While Megatron-LM builds model and optimizer; it tells both when its checkpoint is loaded."""
        self._in_setup = True
        try:
            yield
        finally:
            self._in_setup = False

    def optimizer_ready(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """The same, in scripts on megatron-core alone, and where others replaced Megatron-LM's function."""
        if not self._in_setup:
            self.model_ready(chunks, optimizer)

    def _never_attached(self) -> None:
        if self.session is None and environment_rank() == 0:
            print(
                "msprobe: armed, but no model was attached: neither setup_model_and_optimizer nor"
                " get_megatron_optimizer was called; nothing was recorded",
                file=sys.stderr,
                flush=True,
            )


def arm(flags: Flags | None = None, *, install: bool = True) -> Armed:
    """Make this process ready; the same answer when called again.

    `install` is whether Megatron may be made to run on CPU, which has to come before its import.

    Example::

        arm()          # before `import megatron`
    """
    global _armed  # noqa: PLW0603  (one command line a process)
    if _armed is not None:
        return _armed
    flags = flags or from_command_line()
    try:
        config = _config_of(flags)
        if install and backends.select(flags.device).name == "cpu":
            from msprobe_megatron.backends import cpu

            cpu.install()
    except CANNOT as error:
        refuse(error)
    _armed = Armed(flags, config)
    return _armed


def _config_of(flags: Flags) -> ProbeConfig | None:
    """The probe file; None where there is none, and where reading it is a fault of the kit and not of the file."""
    try:
        return flags.load_config() if flags.armed else None
    except CANNOT:
        raise
    except Exception as error:
        if flags.strict:
            raise
        if environment_rank() == 0:
            text = f"msprobe: {flags.config} could not be read: {type(error).__name__}: {error}"
            print(f"{text}; training goes on unobserved", file=sys.stderr, flush=True)
        return None


def refuse(error: Exception) -> NoReturn:
    """End the job before training: one line, on one rank (of each node, if it is its disk), exit code 2."""
    of_node = isinstance(error, RunDirectoryError) and not isinstance(error, RunTaken)
    if environment_rank() == 0 or (of_node and environment_number("LOCAL_RANK") == 0):
        print(f"msprobe: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)
