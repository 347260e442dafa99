"""What is bound only while a step is recorded: the patches of that phase, and a watch over memory.

The session applies it when a recorded step begins and reverts it when the step is over.
"""

from __future__ import annotations

from typing import Any, Protocol

from msprobe_megatron.patching import PatchSet, declared
from msprobe_megatron.sites.comm import MemoryWatch
from msprobe_megatron.sites.exchanges import WIRE


class Events(Protocol):
    """Who is told: the session."""

    def memory_changed(self) -> None:
        """Tensors may have changed without their version counters telling."""


class WhileRecording:
    """The patches of recorded steps. `plain` says that there is no Megatron, whose schedules would be looked for.

    Example::

        bound = WhileRecording(session, plain=False)
        bound.apply(memory=True); ...; bound.revert()
    """

    def __init__(self, events: Events, *, plain: bool) -> None:
        left_out = "schedules." if plain else "\0"
        self._patches = PatchSet([p for p in declared("recording") if not p.id.startswith(left_out)], events)
        self._memory = MemoryWatch(events.memory_changed)

    def apply(self, *, memory: bool) -> None:
        """Bind the patches, and what communication writes to if somebody keeps figures of `memory`."""
        self._patches.apply()
        (self._memory.install if memory else self._memory.remove)()

    def revert(self) -> None:
        """Put everything back. Safe to call twice."""
        self._memory.remove()
        self._patches.revert()

    def ledger(self) -> list[dict[str, Any]]:
        """What became of the patches, those of communication too."""
        return [*self._patches.ledger(), *WIRE.ledger()]
