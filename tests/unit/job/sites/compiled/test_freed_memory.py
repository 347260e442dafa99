"""Of a tensor that was freed nothing stays: its weak reference would lie between the data of those that live."""

import pytest
import torch

from msprobe_megatron.job.measure import native
from msprobe_megatron.job.measure.measurer import Measurer
from msprobe_megatron.job.measure.once import SeenTensors
from msprobe_megatron.job.record.slots import SlotTable
from msprobe_megatron.job.sites.compiled import loader
from msprobe_megatron.job.sites.compiled.bindings import tensor_caches

LARGE, SMALL = 1 << 18, 16  # floats


class Python:
    def __init__(self):
        self._seen, self._table = SeenTensors(), SlotTable(torch.device("cpu"))
        self.storages = lambda: len(self._seen._storages)
        self.__len__ = self._seen.__len__

    def see(self, x):
        slot = self._seen.lookup(x)
        if slot is None:
            slot = self._table.take()
            self._seen.remember(x, slot)
        return slot


@pytest.fixture(params=["compiled", "python"])
def seen(request):
    if request.param == "python":
        return Python()
    native.load()
    table = SlotTable(torch.device("cpu"))
    new = tensor_caches(Measurer(table), table)
    if new is None:
        pytest.skip(f"no compiled look: {loader.why_not()}")
    return new()


def test_freed_large_tensors_are_let_go_with_the_next(seen):
    living = [torch.ones(SMALL) for _ in range(20)]
    slots = [seen.see(x) for x in living]
    most = 0
    for n in range(100):
        # An activation, a temporary made of it, and what replaces both: as in a forward pass.
        x = torch.full((LARGE,), float(n))
        seen.see(x)
        seen.see(x * 2)
        most = max(most, seen.storages())
    assert most <= len(living) + 4
    assert [seen.see(x) for x in living] == slots


def test_freed_small_tensors_are_let_go_in_time(seen):
    living = [torch.ones(SMALL) for _ in range(100)]
    slots = [seen.see(x) for x in living]
    most = 0
    for n in range(3000):
        seen.see(torch.full((SMALL,), float(n)))
        most = max(most, seen.storages())
    assert most <= 3 * len(living)
    assert [seen.see(x) for x in living] == slots


def test_what_takes_the_place_of_a_freed_tensor_is_another(seen):
    seen.see(torch.ones(SMALL))
    found = [seen.see(torch.full((SMALL,), float(n))) for n in range(200)]
    assert len(set(found)) == len(found)
