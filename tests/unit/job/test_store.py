"""Messages between ranks through a store: of every kind torch has, without `check`, and one that is gone."""

import threading
import time
from pathlib import Path

import pytest
from torch import distributed

from msprobe_megatron.config import RankSelection
from msprobe_megatron.job.control import Control
from msprobe_megatron.job.store import RING, Bulletin, Missing, StoreChannel, StoreLost
from msprobe_megatron.topology.coordinates import Coordinates

RUN = Path("run")


class WithoutCheck:
    """As the PrefixStore of torch 2.1; a key that was never set must not be waited for."""

    def __init__(self):
        self._values = {}

    def set(self, key, value):
        self._values[key] = value

    def get(self, key):
        return self._values[key]

    def add(self, key, amount):
        self._values[key] = self._values.get(key, 0) + amount
        return self._values[key]


class Unimplemented(WithoutCheck):
    def check(self, keys):
        raise NotImplementedError


class Gone:
    """Answers as long as it is there."""

    def __init__(self):
        self._inner, self.there = distributed.HashStore(), True

    def __getattr__(self, name):
        if not self.there:
            raise ConnectionError("the store has closed")
        return getattr(self._inner, name)


STORES = {
    "hash": lambda tmp_path: distributed.HashStore(),
    "file": lambda tmp_path: distributed.FileStore(str(tmp_path / "store"), 1),
    "prefix": lambda tmp_path: distributed.PrefixStore("worker", distributed.HashStore()),
    "without check": lambda tmp_path: WithoutCheck(),
    "check not implemented": lambda tmp_path: Unimplemented(),
}


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    return STORES[request.param](tmp_path)


def test_a_key_is_read_without_waiting(store):
    one, two = StoreChannel(RUN, "test", store), StoreChannel(RUN, "test", store)
    assert two.poll("key") is None
    one.post("key", b"first")
    one.post("key", b"second")
    assert two.poll("key") == b"second"
    assert one.fault == two.fault == ""


def test_logs_reach_every_rank_in_order_and_once(store):
    one, two, late = (StoreChannel(RUN, "test", store) for _ in range(3))
    assert two.unread("log") == []
    one.append("log", b"a")
    two.append("log", b"b")
    assert two.unread("log") == one.unread("log") == [b"a", b"b"]
    assert two.unread("log") == [] and two.unread("other log") == []
    assert late.skip("log") == 2
    one.append("log", b"c")
    assert late.unread("log") == two.unread("log") == [b"c"]


def test_numbers_are_shared(store):
    one, two = StoreChannel(RUN, "test", store), StoreChannel(RUN, "test", store)
    assert [one.count("n"), two.count("n"), two.count("n", 0)] == [1, 2, 2]


def test_runs_and_purposes_do_not_meet(store):
    StoreChannel(RUN, "test", store).post("key", b"x")
    assert StoreChannel(Path("another"), "test", store).poll("key") is None
    assert StoreChannel(RUN, "another", store).poll("key") is None


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_store_that_is_gone_raises_nothing(from_the_start):
    store = Gone()
    channel = StoreChannel(RUN, "test", store)
    if not from_the_start:
        channel.append("log", b"a")
    store.there = False
    assert channel.unread("log") == []
    assert channel.fault == "ConnectionError: the store has closed" and not channel.connected()
    channel.post("key", b"x")
    channel.append("log", b"b")
    assert (channel.poll("key"), channel.count("n"), channel.skip("log")) == (None, 0, 0)
    store.there = True
    assert not channel.connected(), "what was missed meanwhile is not known: it stays off"


def test_a_process_without_torch_distributed_has_no_store():
    channel = StoreChannel(RUN, "test")
    assert not channel.connected() and channel.fault == ""
    channel.append("log", b"a")
    assert channel.unread("log") == []


def bulletin(store, rank, **kwargs):
    return Bulletin(StoreChannel(RUN, "checks", store), rank, **kwargs)


def test_bulletins(store):
    one, two = bulletin(store, 1), bulletin(store, 2)
    one.post("tp", 3, b"three")
    assert two.read("tp", 3, 1, time.monotonic()) == b"three"
    with pytest.raises(Missing, match="rank 1 has not answered"):
        two.read("tp", 4, 1, time.monotonic() + 0.01)
    one.post("tp", 3 + RING, b"later")
    with pytest.raises(Missing, match="gone on to 11"):
        two.read("tp", 3, 1, time.monotonic() + 0.01)
    threading.Timer(0.05, lambda: one.post("tp", 4, b"four")).start()
    assert two.read("tp", 4, 1, time.monotonic() + 10) == b"four"
    assert two.read_all("tp", 4, [1], time.monotonic()) == {1: b"four"}


def test_nobody_is_waited_for_after_the_end():
    with pytest.raises(Missing):
        bulletin(distributed.HashStore(), 1, stopped=lambda: True).read("tp", 0, 2, time.monotonic() + 1000)


def test_a_bulletin_says_that_the_store_is_gone():
    store = Gone()
    board = bulletin(store, 1)
    board.post("tp", 0, b"")
    store.there = False
    with pytest.raises(StoreLost, match="ConnectionError"):
        board.read("tp", 0, 2, time.monotonic() + 1000)
    with pytest.raises(StoreLost, match="ConnectionError"):
        board.post("tp", 1, b"")


@pytest.mark.parametrize("leads", [True, False])
def test_orders_end_with_the_store_and_no_rank_obeys_alone(tmp_path, leads):
    store, said, obeyed = Gone(), [], []
    where = Coordinates(rank=0 if leads else 1, world=2)
    control = Control(tmp_path, where, RankSelection(), lambda text, event: said.append(text))
    control._channel = StoreChannel(tmp_path, "control", store)
    assert not control.apply_due(0, lambda order: True)
    store.there = False
    control.request(next=1)
    for step in range(1, 6):
        assert not control.apply_due(step, lambda order: bool(obeyed.append(order)) or True)
    assert said == ["control.json is no longer read: ConnectionError: the store has closed"] and obeyed == []
