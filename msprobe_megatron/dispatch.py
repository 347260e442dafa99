"""Routes the process-wide schedule patches to the session whose model is running.

Several models may train in one process (actor and critic, teacher and student); the schedules are module globals, so
there is one set of patches and a table from model chunks to sessions.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from msprobe_megatron.patching import PatchSet, declared
from msprobe_megatron.topology import names


def megatron_schedules() -> bool:
    """Whether this process has Megatron's schedules; a plain torch loop has none to patch."""
    return "megatron.core.pipeline_parallel.schedules" in sys.modules


class Dispatcher:
    """Routes the process-wide schedule patches to the session whose model is running."""

    def __init__(self) -> None:
        self._by_chunk: dict[int, Any] = {}
        self._patches: PatchSet | None = None

    def add(self, session: Any, chunks: Iterable[int]) -> None:
        """Route the chunks with these identities to `session`; the first one brings the patches."""
        if self._patches is None:
            self._patches = PatchSet(declared("functions"), self)
        if megatron_schedules():
            self._patches.apply()
            self._patches.verify()
        # A session without a model (API calls only) stands under its own identity.
        self._by_chunk.update(dict.fromkeys(list(chunks) or [id(session)], session))

    def remove(self, session: Any) -> None:
        """Forget a session; the last one takes the patches with it."""
        self._by_chunk = {key: value for key, value in self._by_chunk.items() if value is not session}
        if not self._by_chunk and self._patches is not None:
            self._patches.revert()

    def sessions(self) -> list[Any]:
        """The sessions that are armed in this process."""
        return list({id(session): session for session in self._by_chunk.values()}.values())

    def forget(self) -> None:
        """In a fork of the process that trains (a data-loader worker): see, write and say nothing."""
        for session in self.sessions():
            with contextlib.suppress(Exception):  # nobody is there to be told
                session.leave()
        self._by_chunk.clear()

    def verify(self) -> list[str]:
        """Bind again what somebody overwrote; the targets that had been lost."""
        return self._patches.verify() if self._patches is not None else []

    def ledger(self) -> list[dict[str, Any]]:
        """What became of the patches."""
        return self._patches.ledger() if self._patches is not None else []

    def session_of(self, model: Any) -> Any | None:
        """The session that watches this model (a chunk, or the list of chunks of a schedule)."""
        try:
            return self._find(model)
        except Exception as error:  # whose model it was is not known now
            for session in self.sessions():
                session.fault(error, "session_of")
            return None

    def _find(self, model: Any) -> Any | None:
        chunk = model[0] if isinstance(model, list | tuple) and model else model
        found = self._by_chunk.get(id(chunk))
        if found is None and isinstance(chunk, nn.Module):
            found = self._by_chunk.get(id(names.unwrap(chunk)))
        return found


DISPATCHER = Dispatcher()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=DISPATCHER.forget)
