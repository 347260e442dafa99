"""Which step is the coming one: told by the caller, by Megatron's own iteration, else counted from where it resumed."""

from __future__ import annotations

from collections.abc import Callable

from msprobe_megatron.topology import host


class StepNumbers:
    """The number of the coming step, and of the last one.

    Example::

        steps = StepNumbers(first=7)
        steps.coming()       # 7
        steps.passed()
        steps.coming()       # 8
    """

    def __init__(self, first: int | Callable[[], int] | None) -> None:
        self._source = first if callable(first) else None
        self._count = first if isinstance(first, int) else -1
        self.last = -1

    def coming(self) -> int:
        """The number of the step that begins now."""
        if self._source is not None:
            self._count = int(self._source())
        else:
            iteration = host.megatron_iteration()
            if iteration is not None:
                self._count = iteration
            elif self._count < 0:
                self._count = host.resumed_iteration()
        self.last = self._count
        return self._count

    def passed(self) -> None:
        """The step is over."""
        self._count += 1
