"""The clock of a session: step, microbatch, virtual stage, phase, and the order of execution.

The schedule sets it; sites only read it. Never a count of calls: a pipeline runs several microbatches at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import NamedTuple

import torch

# In 0.2 us: is this thread inside the autograd engine? Old torch has no such function; then only
# Megatron's own checkpoints are told apart from the forward.
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def inside_backward() -> bool:
    """Whether this thread is inside the autograd engine."""
    return bool(_graph_task() != -1)


class Moment(NamedTuple):
    """Which microbatch of which model chunk is meant."""

    microbatch: int
    chunk: int


class Clock:
    """State of the running step.

    Example::

        clock = Clock()
        clock.start_step(10)
        clock.moment = Moment(microbatch=0, chunk=0)
        clock.phase()          # "forward"
    """

    def __init__(self) -> None:
        self.step = -1
        self.seq = 0
        self.moment = Moment(0, 0)
        self.backward_moment = Moment(0, 0)
        self.offset = 0
        self._recomputing = 0
        self._thread = 0
        self.away: set[int] = set()
        """Threads that run the model for something else than the step; see `elsewhere`."""

    def start_step(self, step: int) -> None:
        """Begin a step: the order of execution counts from 0 again."""
        self.step, self.seq, self.offset = step, 0, 0
        # A stage receives before its first microbatch begins; that is not of the last step's.
        self.moment = self.backward_moment = Moment(0, 0)
        self._recomputing = 0
        self._thread = get_ident()

    def tick(self) -> int:
        """Next number in the order of execution."""
        self.seq += 1
        return self.seq - 1

    def calling(self) -> tuple[str, Moment]:
        """Phase and microbatch of a module that is being called now.

        Checkpoints that the kit does not know are recognised by the running autograd engine; their microbatch is
        that of the gradient seen last.
        """
        if self._recomputing:
            return "recompute", self.moment
        if _graph_task() != -1:
            return "recompute", self.backward_moment
        return "forward", self.moment

    def passing(self) -> tuple[str, Moment]:
        """Phase and microbatch of what happens now, outside of modules too: inside the engine it is the backward."""
        phase, moment = self.calling()
        return ("backward" if phase == "recompute" and not self._recomputing else phase), moment

    def elsewhere(self) -> AbstractContextManager[None] | None:
        """For a thread that is not the one of the step: while it evaluates the model. None for the one of the step."""
        return None if self._thread == get_ident() else self._evaluating()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        thread = get_ident()
        inner = thread in self.away
        self.away.add(thread)
        try:
            yield
        finally:
            if not inner:
                self.away.discard(thread)

    def apart(self) -> bool:
        """Whether what this thread runs now is not of the step; ask only if there is anybody `away`."""
        return get_ident() in self.away

    @contextmanager
    def recomputing(self, moment: Moment | None) -> Iterator[None]:
        """While a checkpoint repeats the forward of `moment`."""
        before = self.moment
        self.moment = moment if moment is not None else self.backward_moment
        self._recomputing += 1
        try:
            yield
        finally:
            self._recomputing -= 1
            self.moment = before
