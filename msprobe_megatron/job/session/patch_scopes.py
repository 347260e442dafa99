"""What is bound for as long as a session is awake: the schedules' route to it, `optimizer.step`, a plain loop's model.

Each of them compares one integer on a step that nobody asked for; the rest is bound by `while_recording`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from msprobe_megatron.dispatch import DISPATCHER
from msprobe_megatron.patches.optimizer import wrap_step
from msprobe_megatron.plain_loop import watch_forwards


class AllTheTime:
    """The wrappers of one session. `plain` says that no schedule tells of a step, so that the model's calls have to.

    Example::

        bound = AllTheTime(session, chunks, {id(chunk): 0}, optimizer, plain=False)
        bound.apply(); ...; bound.revert()
    """

    def __init__(
        self, session: Any, chunks: Iterable[nn.Module], chunk_of: Mapping[int, int], optimizer: Any, *, plain: bool
    ) -> None:
        self._session, self._chunks, self._chunk_of = session, list(chunks), chunk_of
        self._optimizer, self._plain = optimizer, plain
        self._undo: list[Callable[[], None]] = []
        self._bound = False

    def apply(self) -> None:
        """Bind them. Safe to call twice."""
        if self._bound:
            return
        self._bound = True
        DISPATCHER.add(self._session, self._chunk_of)
        if self._optimizer is not None:
            self._undo.append(wrap_step(self._optimizer, self._session))
        if self._plain:
            self._undo.append(watch_forwards(self._chunks, self._session))

    def revert(self) -> None:
        """Put everything back. Safe to call twice."""
        self._bound = False
        DISPATCHER.remove(self._session)
        while self._undo:
            self._undo.pop()()
