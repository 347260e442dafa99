"""Flight recorders of all ranks notify each other: the steps that one rank writes, the others write too.

A rank that writes leaves a notice with its step in the store of torch.distributed; the others look there once per
step, in their writer threads. No collective and no waiting: a rank that has ended only sends no notices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_megatron.job.store import StoreChannel

AHEAD = 8
"""Steps by which a rank may be ahead when a notice arrives: statistics arrive late, and ranks are not in lockstep."""


class Call(NamedTuple):
    """Another rank has written the steps that led to this one."""

    step: int
    rank: int
    reason: str


class PeerNotices:
    """The notices of one run."""

    def __init__(self, run: Path, rank: int, store: Any = None) -> None:
        self._channel, self._rank = StoreChannel(run, "recorder", store), rank
        self._first = self._channel.skip("notices")

    @property
    def fault(self) -> str:
        """Why notices are neither sent nor received any more; empty as long as they are."""
        return self._channel.fault

    def post(self, step: int, reason: str) -> None:
        """Notify the other ranks, unless one of them did so for this step already. From any thread."""
        if self._channel.count(f"{self._first}/step/{step}") == 1:
            self._channel.append("notices", json.dumps([step, self._rank, reason]).encode())

    def news(self) -> list[Call]:
        """The notices of other ranks since the last call; one question to the store if there is none."""
        calls = [Call(*json.loads(content)) for content in self._channel.unread("notices")]
        return [call for call in calls if call.rank != self._rank]
