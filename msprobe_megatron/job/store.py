"""Small messages between ranks through the store that torch.distributed was started with.

No collective and no waiting in the training thread: a collective that one rank does not enter stops the job, a message
that one rank does not post is only a missing message. `StoreChannel` is the one way to the store; orders (`control`)
and notices of the flight recorder use its logs, the checks use a `Bulletin` on top of it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed

RING = 8
"""Numbers of a topic that are kept at once; a reader that is further behind has missed the older ones."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1
_Answer = TypeVar("_Answer")


class Missing(Exception):
    """Another rank has not posted in time, or has gone on."""


class StoreLost(Exception):
    """The store does not answer any more."""


def job_store() -> Any:
    """The store of this job over a connection of its own where it can give one; None where there is none."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    store: Any = distributed.distributed_c10d._get_default_store()
    try:
        # A thread that waits on the shared connection would make every other caller wait too.
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store


class StoreChannel:
    """The messages of one purpose in one run, under keys ``msprobe/RUN/PURPOSE/…``. No method raises or blocks.

    The first error of the store is kept in `fault`; from then on the channel is silent, as if no other rank posted.
    Connects on first use, because a job may attach before it initializes torch.distributed.
    """

    def __init__(self, run: Path, purpose: str, store: Any = None) -> None:
        self._prefix = f"msprobe/{hashlib.sha256(str(run).encode()).hexdigest()[:16]}/{purpose}"
        self._given, self._store = store, None
        self._can_check = True
        self._positions: dict[str, int] = {}
        self.fault = ""
        """The first error of the store; empty as long as it answers."""

    def connected(self) -> bool:
        """Whether there is a store that answers."""
        if self._store is None and not self.fault:
            store = self._given if self._given is not None else job_store()
            if store is not None:
                self._store = store
                self._can_check = self._guarded(self._try_check, default=False)
        return self._store is not None

    def post(self, key: str, content: bytes) -> None:
        """Leave `content` under `key` for the other ranks, in place of what was there."""

        def call(store: Any) -> None:
            store.set(f"{self._prefix}/{key}", content)
            if not self._can_check:
                store.add(f"{self._prefix}/{key}/posted", 1)

        self._guarded(call, default=None)

    def poll(self, key: str) -> bytes | None:
        """What was posted under `key`; None if nothing was."""

        def call(store: Any) -> bytes | None:
            return bytes(store.get(f"{self._prefix}/{key}")) if self._posted(store, key) else None

        return self._guarded(call, default=None)

    def count(self, key: str, amount: int = 1) -> int:
        """Add to a number that all ranks share; returns its new value."""
        return self._guarded(lambda store: int(store.add(f"{self._prefix}/{key}", amount)), default=0)

    def append(self, log: str, content: bytes) -> None:
        """Append a message to a log that every rank can append to. From any thread."""
        number = self.count(f"{log}/length")
        if number:
            self.post(f"{log}/{number}", content)

    def skip(self, log: str) -> int:
        """Ignore the messages that are in the log now: a store outlives a session. Returns how many there are."""
        self._positions[log] = self.count(f"{log}/length", 0)
        return self._positions[log]

    def unread(self, log: str) -> list[bytes]:
        """The messages of a log since the last call; one question to the store if there is none."""
        found = []
        while (content := self.poll(f"{log}/{self._positions.get(log, 0) + 1}")) is not None:
            self._positions[log] = self._positions.get(log, 0) + 1
            found.append(content)
        return found

    def _try_check(self, store: Any) -> bool:
        try:
            store.check([f"{self._prefix}/check"])
        except (AttributeError, NotImplementedError):  # PrefixStore of torch 2.1
            return False
        return True

    def _posted(self, store: Any, key: str) -> bool:
        if self._can_check:
            return bool(store.check([f"{self._prefix}/{key}"]))
        return int(store.add(f"{self._prefix}/{key}/posted", 0)) > 0

    def _guarded(self, question: Callable[[Any], _Answer], default: _Answer) -> _Answer:
        if not self.connected():
            return default
        try:
            return question(self._store)
        except Exception as error:  # the rank that held the store has ended, usually
            self._store, self.fault = None, f"{type(error).__name__}: {error}"
            return default


class Bulletin:
    """Numbered messages by topic, one from each rank, that any rank can wait for; not for the training thread.

    Every rank posts under its own keys, in a ring of a few numbers, so that the store does not grow.
    """

    def __init__(self, channel: StoreChannel, rank: int, stopped: Callable[[], bool] = lambda: False) -> None:
        self._channel, self._rank, self._stopped = channel, rank, stopped

    def post(self, topic: str, number: int, content: bytes) -> None:
        """Leave a message for the others, in place of the one eight numbers before. Raises `StoreLost`."""
        self._channel.post(_key(topic, number, self._rank), number.to_bytes(8, "little") + content)
        self._raise_if_lost()

    def read(self, topic: str, number: int, rank: int, until: float) -> bytes:
        """Wait for the message of another rank until this time of the monotonic clock.

        Raises `Missing` if it does not come, and `StoreLost`.
        """
        key, pause = _key(topic, number, rank), _FIRST_PAUSE
        while True:
            content = self._channel.poll(key)
            self._raise_if_lost()
            if content is not None:
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

    def _raise_if_lost(self) -> None:
        if self._channel.fault:
            raise StoreLost(self._channel.fault)


def _key(topic: str, number: int, rank: int) -> str:
    return f"{topic}/{number % RING}/{rank}"
