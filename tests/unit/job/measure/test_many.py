"""Many tensors in one call: the kernel at every level and its torch twin against NumPy float64."""

import pytest
import torch

from msprobe_megatron.job.measure.compiled import Compiled
from msprobe_megatron.job.measure.many import Many
from msprobe_megatron.job.measure.measurer import Measurer
from msprobe_megatron.job.measure.stats import Stats
from msprobe_megatron.job.record.slots import SlotTable
from tests.unit.job.measure.kernels import DTYPES, INF, NAN, kernels, values
from tests.unit.job.measure.oracle import assert_stats

KERNELS = [*kernels(), None, "segments"]
every_way = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: getattr(kernel, "level", kernel or "torch"))
SIZES = (1, 7, 31, 32, 33, 511, 513, 2049, 16384, 16385, 70_001)


def measured(kernel, tensors):
    """The figures of tensors that are measured together."""
    table = SlotTable(torch.device("cpu"))
    measurer = Measurer(table)
    measurer.compiled = None if kernel is None or kernel == "segments" else Compiled(kernel)
    measurer.on_host = kernel != "segments"  # as on another device
    many = Many(measurer)
    slots = [table.take() for _ in tensors]
    assert many(tensors, slots) == []
    floats, counts = table.seal().wait()
    return [Stats(*floats[slot].tolist(), *counts[slot].tolist()) for slot in slots]


@every_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_segments_of_a_buffer(kernel, dtype):
    buffer = values((sum(SIZES) + 3,), dtype)
    edges = [3]  # no segment is aligned
    for size in SIZES:
        edges.append(edges[-1] + size)
    segments = [buffer[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    for found, segment in zip(measured(kernel, segments), segments, strict=True):
        assert_stats(found, segment, relative=0.0 if not dtype.is_floating_point else 1e-6)


@every_way
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-14, 1e-7, 1e7, 1e17, 1e25], ids=str)
def test_extremes_of_single_precision(kernel, scale):
    x = values((5000,), torch.float32) * scale
    (found,) = measured(kernel, [x])
    assert_stats(found, x)


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_value_that_is_not_finite(kernel, dtype):
    for bad in (NAN, INF, -INF):
        for at in (0, 17, 4999, 32_767):
            x = values((40_000,), dtype)
            x[at] = bad
            (found,) = measured(kernel, [x])
            assert_stats(found, x)


@every_way
def test_other_tensors_than_runs_of_host_memory(kernel):
    x = values((6, 50), torch.float32)
    tensors = [x.t(), x[:, ::3], x[:0], torch.ones(3, dtype=torch.complex64), x[2]]
    for found, tensor in zip(measured(kernel, tensors), tensors, strict=True):
        assert_stats(found, tensor)


@pytest.mark.skipif(len(kernels()) < 2, reason="only one level here")
def test_every_level_gives_the_same_bits():
    tensors = [values((size,), dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    first, *others = [measured(kernel, tensors) for kernel in kernels()]
    assert all(other == first for other in others)


@every_way
def test_what_moves_is_found_again(kernel):
    table = SlotTable(torch.device("cpu"))
    measurer = Measurer(table)
    measurer.compiled = None if kernel is None or kernel == "segments" else Compiled(kernel)
    measurer.on_host = kernel != "segments"
    many = Many(measurer)
    for size in (10, 10, 2000):
        x = values((size,), torch.float32, seed=size)
        slot = table.take()
        many([x], [slot])
        x += 1  # the same memory, other numbers
        again = table.take()
        many([x], [again])
        floats, counts = table.seal().wait()
        assert_stats(Stats(*floats[again].tolist(), *counts[again].tolist()), x)
        assert_stats(Stats(*floats[slot].tolist(), *counts[slot].tolist()), x - 1, relative=1e-5)


def test_what_cannot_be_measured_is_told():
    table = SlotTable(torch.device("cpu"))
    many = Many(Measurer(table))
    assert many([torch.ones(2), torch.empty(2, device="meta")], [table.take(), table.take()]) == [1]
