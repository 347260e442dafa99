"""The clock of a session: step, microbatch, virtual stage, phase, and the order of execution.

The session sets it and sites read it. The microbatch is never a count of calls: a pipeline interleaves several.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch

# 0.2 us. Old torch has no such function; then only Megatron's own checkpoints are recognised as recomputation.
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def inside_backward() -> bool:
    """Whether this thread is inside the autograd engine."""
    return bool(_graph_task() != -1)


class Moment(NamedTuple):
    """A microbatch on a model chunk."""

    microbatch: int
    chunk: int


class Clock:
    """State of the running step."""

    def __init__(self) -> None:
        self.step = -1
        self.seq = 0
        self.moment = Moment(0, 0)
        self.backward_moment = Moment(0, 0)
        self.offset = 0
        self._recomputing = 0
        self._thread = 0
        self.passes: list[dict[str, Any]] = []
        """The forward-only passes of the running step; see `session.passes`."""
        self.away: set[int] = set()
        """Threads that run the model outside the step; see `elsewhere`. The compiled hooks read it under this name."""

    def start_step(self, step: int) -> None:
        """Begin a step: the order of execution counts from 0 again."""
        self.step, self.seq, self.offset = step, 0, 0
        # A stage receives before its first microbatch begins: that is not part of the last step's microbatch.
        self.moment = self.backward_moment = Moment(0, 0)
        self._recomputing = 0
        self.passes = []
        self._thread = get_ident()

    def tick(self) -> int:
        """Next number in the order of execution."""
        self.seq += 1
        return self.seq - 1

    def calling(self) -> tuple[str, Moment]:
        """Phase and microbatch of a module that is being called now.

        A forward inside the autograd engine is recomputation by a checkpoint that the kit does not patch; its
        microbatch is that of the latest gradient.
        """
        if self._recomputing:
            return "recompute", self.moment
        if _graph_task() != -1:
            return "recompute", self.backward_moment
        return "forward", self.moment

    def passing(self) -> tuple[str, Moment]:
        """Phase and microbatch of an event outside of modules: inside the autograd engine it is the backward."""
        phase, moment = self.calling()
        return ("backward" if phase == "recompute" and not self._recomputing else phase), moment

    def elsewhere(self) -> AbstractContextManager[None] | None:
        """A context for a thread other than that of the step, while it evaluates the model; None in the latter."""
        return None if self._thread == get_ident() else self._evaluating()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        thread = get_ident()
        nested = thread in self.away
        self.away.add(thread)
        try:
            yield
        finally:
            if not nested:
                self.away.discard(thread)

    def apart(self) -> bool:
        """Whether calls of this thread are not part of the step; call only if `away` is not empty."""
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
