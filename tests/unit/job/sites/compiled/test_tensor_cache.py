"""The compiled look and its twin in Python agree: on what a tensor is, on what changes it, and on its figures."""

import gc

import numpy as np
import pytest
import torch

from msprobe_megatron.job.measure import native
from msprobe_megatron.job.measure.measurer import Measurer
from msprobe_megatron.job.measure.once import SeenTensors
from msprobe_megatron.job.record.slots import VIEW_BYTES, SlotTable
from msprobe_megatron.job.sites.compiled import loader
from msprobe_megatron.job.sites.compiled.bindings import NO_ROOM, UNSUPPORTED, tensor_caches

INF, NAN = float("inf"), float("nan")


class Pair:
    """A compiled look and the twin, each with a table of its own."""

    def __init__(self, **limits):
        native.load()
        self.table = SlotTable(torch.device("cpu"), **limits)
        new = tensor_caches(Measurer(self.table), self.table)
        if new is None:
            pytest.skip(f"no compiled look: {loader.why_not()}")
        self.look, self.seen = new(), SeenTensors()
        self.twin = SlotTable(torch.device("cpu"))
        self.measure = Measurer(self.twin)

    def python(self, x):
        slot = self.seen.lookup(x)
        if slot is None:
            slot = self.twin.take()
            self.measure(x, slot)
            self.seen.remember(x, slot)
        return slot


def samples():
    base = torch.arange(-12.0, 12.0).reshape(4, 6)
    odd = torch.tensor([1.0, NAN, INF, -INF, 0.0, -0.0])
    yield from (base, base.t(), base.view(2, 12), odd, torch.empty(0, 3), torch.tensor(2.5), torch.zeros(3, 1, 2))
    yield from (base[1:], base.double(), base.half(), base.bfloat16(), base.to(torch.int16), base.long(), base > 0)
    yield from (base.to(torch.uint8), base.to(torch.float8_e4m3fn), torch.nn.Parameter(base.clone()), base * 1e30)
    yield torch.randn(3, 5, 7).permute(2, 0, 1).requires_grad_()
    # With gaps: rows shorter and longer than a piece, repeated, overlapping, in another order, of every width.
    wide = torch.randn(300, 3, 64)
    for x in (wide, wide.double(), wide.bfloat16(), wide > 0, (100 * wide).to(torch.int16)):
        yield from (x[:, 1], x[:, :, ::3], x[:, 1].t(), x.permute(2, 0, 1)[:, ::2], x[:0, 1], x[:1, 1:2, 7:8])
    yield from (torch.randn(2, 5000)[:, :4999], torch.randn(5000, 2)[:, 1], torch.tensor(3.0).expand(7, 2100))
    yield from (wide[:, :1].expand(300, 5, 64), wide.view(-1).as_strided((40, 50), (3, 2)), base[::2, 1::2])


def test_figures_are_those_of_the_twin():
    pair = Pair()
    tensors = list(samples())
    for x in tensors:
        assert pair.look.see(x) == pair.python(x)
    ours, theirs = pair.table.seal().wait(), pair.twin.seal().wait()
    assert len(ours[0]) == len(theirs[0]) > 15
    for left, right in zip(ours, theirs, strict=True):
        assert left.tobytes() == right.tobytes()
    values = tensors[0].numpy().astype(np.float64)
    assert ours[0][0].tolist() == [values.min(), values.max(), values.sum(), (values**2).sum(), np.abs(values).max()]


def test_known_until_it_changes():
    pair = Pair()
    x = torch.ones(4, 6)
    views = (lambda: x, lambda: x.view(4, 6), lambda: x[:2], lambda: x.view(6, 4), lambda: x.t(), lambda: x.detach())
    changes = (lambda: None, lambda: x.add_(1), lambda: x[0].zero_(), lambda: x.t_(), lambda: x.set_(torch.ones(24)))
    for change in changes:
        change()
        for view in views:
            try:
                shown = view()
            except RuntimeError:  # not a view that this shape has
                continue
            assert pair.look.see(shown) == pair.python(shown)
    x.data = torch.zeros(24)
    assert pair.look.see(x) == pair.python(x)
    pair.look.forget_all()
    pair.seen.invalidate()
    assert len(pair.look) == 0 and pair.look.see(x) == pair.python(x)


def test_places_and_dtypes_within_one_memory_are_told_apart():
    pair = Pair()
    memory = torch.arange(1.0, 13.0)
    shown = [memory[0:4], memory[4:8], memory[8:12], memory[4:8].view(torch.int32), memory[4:8].view(2, 2)]
    shown += [memory[4:8].view(2, 2).t(), memory[4:8].view(1, 4)]
    slots = [pair.look.see(x) for x in shown]
    assert slots == [pair.python(x) for x in shown] == [0, 1, 2, 3, 4, 5, 6]
    sums = pair.table.seal().wait()[0][:3, 2].tolist()
    assert sums == [10.0, 26.0, 42.0]


def test_memory_that_is_given_to_another_tensor_is_not_taken_for_the_first():
    pair = Pair()
    found, places = set(), set()
    for n in range(50):
        x = torch.full((1000,), float(n))
        places.add(x.data_ptr())
        found.add(pair.look.see(x))
        del x
    assert len(found) == 50 > len(places)


def test_a_look_keeps_no_memory_alive():
    pair = Pair()
    x = torch.ones(1000)
    weak = x.untyped_storage()._weak_ref()
    pair.look.see(x)
    del x
    gc.collect()
    assert torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)


def test_freed_tensors_are_forgotten_in_time():
    pair = Pair()
    kept = torch.ones(3)
    slot = pair.look.see(kept)
    most = 0
    for _ in range(14_000):  # more than once, and never more of them than the first time
        pair.look.see(torch.zeros(1))
        most = max(most, len(pair.look))
    assert most < 4200 and pair.look.see(kept) == slot


class Fancy(torch.Tensor):
    """A subclass."""


def not_for_the_look():
    x = torch.randn(4, 6, dtype=torch.complex64)
    yield from (x, x.conj(), x.conj().imag)
    yield from (torch.ones(3, device="meta"), torch.eye(3).to_sparse(), torch.ones(3).as_subclass(Fancy))
    yield torch._efficientzerotensor((3,))
    with torch.inference_mode():
        yield torch.ones(3)
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    yield freed


def test_what_is_not_plain_is_left_to_the_twin():
    pair = Pair()
    for x in not_for_the_look():
        assert pair.look.see(x) == UNSUPPORTED
    seen = []
    torch.func.vmap(lambda x: (seen.append(pair.look.see(x)), x)[1])(torch.ones(3, 2))
    torch.func.grad(lambda x: (seen.append(pair.look.see(x)), x.sum())[1])(torch.ones(3))
    assert seen == [UNSUPPORTED] * 2 and len(pair.look) == 0 and pair.look.see("no tensor") == UNSUPPORTED


def test_no_room():
    pair = Pair(rows_per_block=1, limit_bytes=2 * (9 * 8 + VIEW_BYTES))
    kept = [torch.full((2,), float(n)) for n in range(4)]
    slots = [pair.look.see(x) for x in kept]
    assert slots[-1] == NO_ROOM and slots[0] == 0 and pair.table.dropped == slots.count(NO_ROOM)


def test_tensor_is_left_as_it_was():
    pair = Pair()
    x = torch.ones(3, requires_grad=True) * 2
    version, node = x._version, x.grad_fn
    pair.look.see(x)
    assert x._version == version and x.grad_fn is node and x.tolist() == [2.0] * 3
