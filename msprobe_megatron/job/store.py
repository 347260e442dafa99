"""Small messages between ranks through the store that torch.distributed was started with: no collective, no waiting
in the training thread.

A collective that one rank does not enter stops the job; a message that one rank does not post is a message missing.
Every rank posts under its own keys, in a ring of a few numbers, so that the store never grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import distributed

RING = 8
"""Numbers that are there at once; who is further behind than that has missed it."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1


class Missing(Exception):
    """Another rank has not posted in time, or has gone on."""


def job_store() -> Any:
    """The store of this job over a connection of its own where it can give one, or None.

    Example::

        Bulletin(job_store(), "msprobe/checks", rank=3)
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    store: Any = distributed.distributed_c10d._get_default_store()
    try:
        # Another thread that waits on the shared connection would make us wait too.
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store


class Bulletin:
    """Numbered messages by topic: one from each rank, for any rank to read.

    Example::

        board = Bulletin(job_store(), "msprobe/checks", rank=1)
        board.post("tp", 12, b"…")
        board.read("tp", 12, rank=0, until=time.monotonic() + 30)
    """

    def __init__(self, store: Any, prefix: str, rank: int, stopped: Callable[[], bool] = lambda: False) -> None:
        self._store, self._prefix, self._rank, self._stopped = store, prefix, rank, stopped

    def post(self, topic: str, number: int, content: bytes) -> None:
        """Leave a message for the others; it takes the place of the one eight numbers before."""
        self._store.set(self._key(topic, number, self._rank), number.to_bytes(8, "little") + content)

    def read(self, topic: str, number: int, rank: int, until: float) -> bytes:
        """The message of another rank, waited for until this moment of the monotonic clock; raises `Missing`."""
        key, pause = [self._key(topic, number, rank)], _FIRST_PAUSE
        while True:
            if self._store.check(key):
                content = bytes(self._store.get(key[0]))
                posted = int.from_bytes(content[:8], "little")
                if posted == number:
                    return content[8:]
                if posted > number:
                    raise Missing(f"rank {rank} has gone on to {posted}")
            if self._stopped() or time.monotonic() >= until:
                raise Missing(f"rank {rank} has not answered")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def read_all(self, topic: str, number: int, ranks: Sequence[int], until: float) -> dict[int, bytes]:
        """The messages of all these ranks."""
        return {rank: self.read(topic, number, rank, until) for rank in ranks}

    def _key(self, topic: str, number: int, rank: int) -> str:
        return f"{self._prefix}/{topic}/{number % RING}/{rank}"
