"""Many tensors by a few torch operations: the path of accelerators, on the CPU."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_megatron.job.measure import segments
from msprobe_megatron.job.measure.many import Many
from msprobe_megatron.job.measure.measurer import Measurer
from msprobe_megatron.job.measure.segments import Segments, plan_stretches
from msprobe_megatron.job.measure.stats import Stats
from msprobe_megatron.job.record.slots import SlotTable
from tests.unit.job.measure.kernels import INF, NAN, values
from tests.unit.job.measure.oracle import assert_stats


def figures(tensors, wide=torch.float64):
    floats, counts = Segments(tensors, wide)(tensors)
    return [Stats(*f.tolist(), *c.tolist()) for f, c in zip(floats, counts, strict=True)]


def cut(buffer, edges):
    return [buffer[a:b] for a, b in zip(edges, edges[1:], strict=False)]


class Counting(TorchDispatchMode):
    """Operations that are more than a view."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("piece", [segments.PIECE, 1024])
def test_every_size_at_every_offset(monkeypatch, piece):
    monkeypatch.setattr(segments, "PIECE", piece)
    sizes = [1, 2, 255, 256, 257, 511, 512, 513, 3, 16_384, 40_001, 1]
    buffer = values((sum(sizes) + 1000,), torch.float32)
    buffer[[5, 300, 900, 2000, 20_000]] = torch.tensor([NAN, INF, -INF, NAN, 0.0])
    for offset in (0, 1, 255, 256, 300):
        edges = [offset]
        for size in sizes:
            edges.append(edges[-1] + size)
        parts = cut(buffer, edges)
        assert len(plan_stretches(parts)) == 1
        for found, part in zip(figures(parts), parts, strict=True):
            assert_stats(found, part)


def test_tensors_that_lie_apart_keep_their_order():
    buffer = values((300_000,), torch.bfloat16)
    mixed = [
        values((700,), torch.float32),
        buffer[10:20],
        values((300_000,), torch.float32),  # large: read where it lies
        buffer[200:1000],
        values((3,), torch.float64),
        buffer[1000:2000].view(10, 100),
        values((5, 7), torch.float32),
        torch.full((4,), NAN),
    ]
    stretches = plan_stretches(mixed)
    assert sorted(i for stretch in stretches for i in stretch.positions) == list(range(len(mixed)))
    assert sum(stretch.copied for stretch in stretches) == 3, "one for each dtype of what lies alone"
    for found, tensor in zip(figures(mixed), mixed, strict=True):
        assert_stats(found, tensor)


def test_holes_that_are_too_large_are_not_read():
    buffer = torch.zeros(1_000_000)
    parts = [buffer[:300_000], buffer[300_100:600_000], buffer[700_000:]]
    assert [stretch.length for stretch in plan_stretches(parts)] == [600_000, 300_000]


def test_devices_without_double_precision():
    parts = cut(values((5000,), torch.float32), [0, 100, 5000])
    for found, part in zip(figures(parts, torch.float32), parts, strict=True):
        assert_stats(found, part, relative=1e-5)


@pytest.mark.parametrize("apart", [False, True], ids=["buffer", "states"])
def test_operations_do_not_grow_with_the_number_of_tensors(apart):
    def operations(number):
        buffer = values((number * 700,), torch.float32)
        parts = [part.clone() if apart else part for part in buffer.split(700)]
        table = SlotTable(torch.device("cpu"), rows_per_block=1024)
        measurer = Measurer(table)
        measurer.compiled, measurer.on_host = None, False
        many, slots = Many(measurer), [table.take() for _ in parts]
        assert many(parts, slots) == []
        with Counting() as counting:
            assert many(parts, slots) == []
        floats, counts = table.seal().wait()
        for part, f, c in zip(parts, floats, counts, strict=True):
            assert_stats(Stats(*f.tolist(), *c.tolist()), part)
        waits = [name for name in counting.calls if "_local_scalar_dense" in name or "nonzero" in name]
        assert not waits
        return counting.calls.total()

    few, many = operations(8), operations(800)
    assert many <= few + 20 and many < 90, (few, many)


def test_copies_are_bounded_and_neighbours_of_another_dtype_are_read_apart(monkeypatch):
    monkeypatch.setattr(segments, "PIECE", 1000)
    parts = [values((size,), torch.float32) for size in (400, 500, 300, 900, 90, 20)]
    stretches = plan_stretches(parts)
    assert [(stretch.positions, stretch.length) for stretch in stretches] == [
        ([0, 1], 900),
        ([2], 300),
        ([3, 4], 990),
        ([5], 20),
    ]
    memory = values((64,), torch.float32)
    both = [memory[:8], memory.view(torch.bfloat16)[16:40]]  # one after the other, by the numbers of their elements
    for tensors in (parts, both, [memory[10:30], memory[5:9], memory[10:30]]):
        for found, part in zip(figures(tensors), tensors, strict=True):
            assert_stats(found, part)


def test_rows_between_segments_belong_to_nobody():
    buffer = values((2000,), torch.float32)
    for parts in (
        [buffer[:256], buffer[512:768]],
        [buffer[256:512], buffer[1024:1027]],
        [buffer[3:5], buffer[512:1024]],
    ):
        assert len(plan_stretches(parts)) == 1
        for found, part in zip(figures(parts), parts, strict=True):
            assert_stats(found, part)
