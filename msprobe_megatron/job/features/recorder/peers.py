"""Flight recorders of all ranks hear of each other: what one rank has a reason to write, the others write too.

A rank that writes leaves a call with its step in the store of torch.distributed; the others look there once a step, in
their writer threads. No collective, and nobody waits: a rank that is gone is a rank that does not answer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_megatron.bulletin import job_store

AHEAD = 8
"""Steps that a rank may have gone on before it hears of a call: figures arrive late, and ranks are not in step."""


class Call(NamedTuple):
    """Another rank has written what led to this step."""

    step: int
    rank: int
    reason: str


class RecorderCalls:
    """The calls of one run.

    Example::

        calls = RecorderCalls(directory.path, rank=1)
        calls.post(7, "alert spike")
        calls.news()                   # [Call(7, 0, "alert spike")] on the other ranks
    """

    def __init__(self, run: Path, rank: int, store: Any = None) -> None:
        self._prefix, self._rank = f"msprobe/{hashlib.sha256(str(run).encode()).hexdigest()[:16]}/recorder", rank
        self._store = store if store is not None else job_store()
        self.fault = ""
        """Why nobody is called or heard any more; empty as long as all is well."""
        # A store outlives a session: what was called before this one began is not for it.
        self._first = self._heard = self._ask(lambda store: int(store.add(f"{self._prefix}/calls", 0))) or 0

    def post(self, step: int, reason: str) -> None:
        """Call the other ranks, unless one of them did so for this step already. From any thread."""

        def call(store: Any) -> None:
            if int(store.add(f"{self._prefix}/{self._first}/step/{step}", 1)) > 1:
                return
            number = int(store.add(f"{self._prefix}/calls", 1))
            store.set(f"{self._prefix}/call/{number}", json.dumps([step, self._rank, reason]))

        self._ask(call)

    def news(self) -> list[Call]:
        """What other ranks have called since the last time; asks the store once if there is nothing."""

        def hear(store: Any) -> list[Call]:
            found = []
            while store.check([f"{self._prefix}/call/{self._heard + 1}"]):
                self._heard += 1
                found.append(Call(*json.loads(store.get(f"{self._prefix}/call/{self._heard}"))))
            return [call for call in found if call.rank != self._rank]

        return self._ask(hear) or []

    def _ask(self, question: Any) -> Any:
        if self._store is None:
            return None
        try:
            return question(self._store)
        except Exception as error:  # a store that is gone, above all: this rank goes on alone
            self._store, self.fault = None, f"{type(error).__name__}: {error}"
            return None
