"""The hot switch: orders that reach every rank of a running job and take effect on the same step everywhere.

One rank, the leader, looks at the control file once a step (one `stat`) and tells the others through the store of
torch.distributed, never by a collective; the others look there once a step (one question, no waiting). Orders
can also come from the kit itself, from any rank and thread: `request`. A job of one process has no store.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import distributed

from msprobe_megatron.config import ConfigError, RankSelection
from msprobe_megatron.config.orders import Order, order_of, parse_order
from msprobe_megatron.record.control_file import ControlFile, ControlFileError
from msprobe_megatron.topology.coordinates import Coordinates, expected

_AHEAD = 2
"""No rank can be further ahead of the leader than one step: it needs the leader to end a step."""
Say = Callable[[str, str], None]


class Control:
    """Orders for this rank.

    Example::

        control = Control(Path("probe_out"), where, config.ranks, voice.say)
        control.tell(step, parts.obey)           # at the beginning of every step
        control.request(next=3, level="mix")     # from anywhere
    """

    def __init__(self, run: Path, where: Coordinates, ranks: RankSelection, say: Say) -> None:
        self._say = say
        self._alone = where.world == 1
        self._leads = where.rank == leader(where, ranks)
        self._file = ControlFile(run)
        self._prefix = f"msprobe/{hashlib.sha256(str(run).encode()).hexdigest()[:16]}"
        self._store: Any = None
        self._asked: deque[Order] = deque()
        self._waiting: list[tuple[int, Order]] = []
        self._given = self._taken = self._answered = 0
        self._off = False

    def tell(self, step: int, obey: Callable[[Order], bool]) -> bool:
        """Hand the orders that take effect with this step to ``obey``; whether there were any."""
        if not self._off:
            try:
                self._look(step)
            except Exception as error:  # a store that is gone, above all: the job goes on as it was told
                self._off = True
                self._say(f"control.json is not looked at any more: {type(error).__name__}: {error}", "control")
        if not self._waiting:
            return False
        due = [(first, order) for first, order in self._waiting if first <= step]
        self._waiting = [item for item in self._waiting if item[0] > step]
        for first, order in due:
            late = f"; it was for step {first}" if first < step else ""
            nobody = "" if obey(order) else ": the probe file has no section for it; nothing changes"
            self._say(f"from step {step}: {order.describe()}{late}{nobody}", "control")
        return bool(due)

    def request(self, **fields: Any) -> None:
        """Order something from inside the job, from any rank and thread; raises ``ConfigError`` for nonsense.

        Example::

            control.request(next=3, level="mix")
        """
        order = order_of(fields)
        if self._alone or self._leads:
            self._asked.append(order)
            return
        store = self._connected()
        if store is not None:
            number = store.add(f"{self._prefix}/asks", 1)
            store.set(f"{self._prefix}/ask/{number}", json.dumps(order.as_dict()))

    def _look(self, step: int) -> None:
        if self._leads:
            orders = list(self._new_orders())
            for order in dict.fromkeys(orders):  # many ranks may ask for the same thing at once
                self._give(step, order)
        elif not self._alone:
            self._receive()

    def _new_orders(self) -> Iterator[Order]:
        while self._asked:
            yield self._asked.popleft()
        if self._file.changed():
            try:
                yield parse_order(self._file.read(), str(self._file.path))
            except (ConfigError, ControlFileError) as error:
                self._say(f"{error}; nothing changes", "control")
        store = None if self._alone else self._connected()
        while store is not None and store.check([f"{self._prefix}/ask/{self._answered + 1}"]):
            self._answered += 1
            yield parse_order(json.loads(store.get(f"{self._prefix}/ask/{self._answered}")), "request")

    def _give(self, step: int, order: Order) -> None:
        first = step if self._alone else step + _AHEAD
        order = order.starting(first)
        store = None if self._alone else self._connected()
        if store is not None:
            message = json.dumps({"from": first, "order": order.as_dict()})
            store.set(f"{self._prefix}/order/{self._given}", message)
            self._given += 1
        elif not self._alone:
            self._say("control.json: torch.distributed has no store in this job; nothing changes", "control")
            return
        self._waiting.append((first, order))

    def _receive(self) -> None:
        store = self._connected()
        while store is not None and store.check([f"{self._prefix}/order/{self._taken}"]):
            message = json.loads(store.get(f"{self._prefix}/order/{self._taken}"))
            self._taken += 1
            self._waiting.append((int(message["from"]), parse_order(message["order"], "order")))

    def _connected(self) -> Any:
        """The job's store, over a connection of its own where the store can give one; None before there is any."""
        if self._store is None and distributed.is_available() and distributed.is_initialized():
            store: Any = distributed.distributed_c10d._get_default_store()
            try:
                # Another thread that waits on the shared connection would make us wait too.
                self._store = store.clone()
            except (AttributeError, RuntimeError, NotImplementedError):
                self._store = store
        return self._store


def leader(where: Coordinates, ranks: RankSelection) -> int:
    """The lowest rank that records, which is the one that looks at the file.

    Example::

        leader(Coordinates(rank=3, world=8), RankSelection())    # 0
    """
    for rank in range(where.world):
        if ranks.selects(rank, expected(where, rank).position()):
            return rank
    return 0
