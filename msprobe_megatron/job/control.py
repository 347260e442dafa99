"""Orders that reach every rank of a running job and take effect on the same step everywhere (`ctl`).

One rank, the leader, looks at the control file once per step (one `stat`) and passes orders on through the store of
torch.distributed, never by a collective; the others look there once per step (one question, no waiting). Orders
can also come from the kit itself, from any rank and thread: `request`. A job of one process needs no store.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msprobe_megatron.config import ConfigError, RankSelection
from msprobe_megatron.config.control_orders import Order, order_of, parse_order
from msprobe_megatron.job.store import StoreChannel, StoreLost
from msprobe_megatron.run_directory.control_file import ControlFile, ControlFileError
from msprobe_megatron.topology.coordinates import Coordinates, expected

_AHEAD = 2
"""No rank can be further ahead of the leader than one step: it needs the leader to end a step."""
Report = Callable[[str, str], None]
"""`report(text, event)`: one line for the user and one event."""


class Control:
    """Orders for this rank."""

    def __init__(self, run: Path, where: Coordinates, ranks: RankSelection, report: Report) -> None:
        self._report = report
        self._alone = where.world == 1
        self._leads = where.rank == leader(where, ranks)
        self._file = ControlFile(run)
        self._channel = StoreChannel(run, "control")
        self._requested: deque[Order] = deque()
        self._waiting: list[tuple[int, Order]] = []
        self._off = False

    def apply_due(self, step: int, obey: Callable[[Order], bool]) -> bool:
        """Hand the orders that take effect with this step to `obey`; returns whether there were any."""
        if not self._off:
            try:
                self._look(step)
            except Exception as error:  # a store that is gone, usually: recording goes on as ordered before
                self._off = True
                text = str(error) if isinstance(error, StoreLost) else f"{type(error).__name__}: {error}"
                self._report(f"control.json is no longer read: {text}", "control")
        if not self._waiting:
            return False
        due = [(first, order) for first, order in self._waiting if first <= step]
        self._waiting = [item for item in self._waiting if item[0] > step]
        for first, order in due:
            late = f"; it was meant for step {first}" if first < step else ""
            ignored = "" if obey(order) else ": the probe file has no section for it; nothing changes"
            self._report(f"from step {step}: {order.describe()}{late}{ignored}", "control")
        return bool(due)

    def request(self, **fields: Any) -> None:
        """Order something from inside the job, from any rank and thread; raises ``ConfigError`` if it is invalid."""
        order = order_of(fields)
        if self._alone or self._leads:
            self._requested.append(order)
        else:
            self._channel.append("requests", json.dumps(order.as_dict()).encode())

    def _look(self, step: int) -> None:
        if self._leads:
            orders = list(self._new_orders())
            for order in dict.fromkeys(orders):  # many ranks may request the same thing at once
                self._give(step, order)
        elif not self._alone:
            for content in self._channel.unread("orders"):
                message = json.loads(content)
                self._waiting.append((int(message["from"]), parse_order(message["order"], "order")))
        if self._channel.fault:
            raise StoreLost(self._channel.fault)

    def _new_orders(self) -> Iterator[Order]:
        while self._requested:
            yield self._requested.popleft()
        if self._file.changed():
            try:
                yield parse_order(self._file.read(), str(self._file.path))
            except (ConfigError, ControlFileError) as error:
                self._report(f"{error}; nothing changes", "control")
        if not self._alone:
            for content in self._channel.unread("requests"):
                yield parse_order(json.loads(content), "request")

    def _give(self, step: int, order: Order) -> None:
        first = step if self._alone else step + _AHEAD
        order = order.starting(first)
        if not self._alone:
            self._channel.append("orders", json.dumps({"from": first, "order": order.as_dict()}).encode())
            if not self._channel.connected():  # the other ranks do not get it
                if not self._channel.fault:
                    self._report("control.json: torch.distributed has no store in this job; nothing changes", "control")
                return
        self._waiting.append((first, order))


def leader(where: Coordinates, ranks: RankSelection) -> int:
    """The lowest rank that records; it is the one that reads the control file.

    Example::

        >>> leader(Coordinates(rank=3, world=8), RankSelection())
        0
    """
    for rank in range(where.world):
        if ranks.selects(rank, expected(where, rank).position()):
            return rank
    return 0
