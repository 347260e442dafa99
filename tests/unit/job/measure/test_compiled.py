"""The compiled kernel against NumPy float64 and against its torch twin, at every level of instructions."""

import pytest
import torch

from msprobe_megatron.job.measure.compiled import Compiled
from msprobe_megatron.job.measure.stats import Stats, measure
from tests.unit.job.measure.kernels import DTYPES, FLOATS, INF, NAN, kernels, layouts_of, values
from tests.unit.job.measure.oracle import assert_stats

KERNELS = kernels()
pytestmark = pytest.mark.skipif(not KERNELS, reason="no compiler: the torch twin is used, which test_stats tests")
every_level = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.level)


def stats_of(kernel, x):
    slot = torch.full((9,), -7, dtype=torch.int64)
    assert Compiled(kernel)(x, slot.data_ptr())
    return Stats(*slot[:5].view(torch.float64).tolist(), *slot[5:].tolist())


@every_level
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (15,), (17,), (33, 65), (3, 70_001)], ids=str)
def test_statistics_of_every_dtype(kernel, dtype, shape):
    x = values(shape, dtype)
    exact = not dtype.is_floating_point
    assert_stats(stats_of(kernel, x), x, relative=0.0 if exact else 1e-13)


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_statistics_of_every_layout(kernel, dtype):
    for name, x in layouts_of(values((4, 6, 50), dtype)):
        assert_stats(stats_of(kernel, x), x, relative=1e-13), name


@every_level
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "ugly", [[NAN], [INF], [-INF], [INF, -INF, NAN], [0.0, -0.0], [NAN, 1.0, -2.0], [INF, 0.0]], ids=str
)
def test_non_finite_values_hide_nothing(kernel, dtype, ugly):
    for repeat in (1, 37, 2000):
        x = torch.tensor(ugly, dtype=dtype).repeat(repeat)
        assert_stats(stats_of(kernel, x), x, relative=1e-13)
    x = values((5000,), dtype)
    x[4321] = NAN
    assert_stats(stats_of(kernel, x), x, relative=1e-13)


@every_level
def test_all_numbers_of_half_precision(kernel):
    """Every bit pattern, subnormals included, alone in its tensor and among others."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        every = patterns.view(dtype)
        assert_stats(stats_of(kernel, every), every, relative=1e-13)
        finite = every[torch.isfinite(every)]
        for start in range(0, finite.numel(), 160):
            some = finite[start : start + 160]
            assert_stats(stats_of(kernel, some), some, relative=1e-13)


@every_level
def test_large_squares_and_float64_extremes(kernel):
    x = torch.tensor([3e38, -3e38, 1e-38] * 40)
    assert_stats(stats_of(kernel, x), x, relative=1e-13)
    x = torch.tensor([1e300, -1e300, 5e-324] * 40, dtype=torch.float64)
    found = stats_of(kernel, x)
    assert (found.min, found.max, found.sumsq) == (-1e300, 1e300, INF)


def test_levels_agree_to_the_bit():
    for dtype in FLOATS:
        x = values((3, 7001), dtype, seed=5)
        assert len({stats_of(kernel, x) for kernel in KERNELS}) == 1
        assert len({stats_of(kernel, x[:, 1:3000:2]) for kernel in KERNELS}) == 1


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_gaps_change_no_bit(kernel, dtype):
    """A tensor with gaps has the figures of its copy without, also where it is read for a digest."""
    x = values((90, 3, 64), dtype, seed=3)
    for part in (x[:, 1], x[:, 1, :40], x[:, :2].transpose(0, 1), x[:50, 2, ::3]):
        order = sorted(range(part.dim()), key=lambda d: -part.stride(d))
        copy = part.permute(order).contiguous()
        assert part.numel() > 50 and stats_of(kernel, part) == stats_of(kernel, copy)
    slot = torch.zeros(10, dtype=torch.int64)
    assert Compiled(kernel, digest=True)(x[:, 1], slot.data_ptr())
    assert Stats(*slot[:5].view(torch.float64).tolist(), *slot[5:9].tolist()) == stats_of(kernel, x[:, 1])


@every_level
def test_twin_gives_the_same(kernel):
    for dtype in DTYPES:
        x = values((31, 129), dtype, seed=9)
        left, right = stats_of(kernel, x), measure(x)
        assert left[:2] == right[:2] and left[4:] == right[4:]
        assert left.sum == pytest.approx(right.sum, rel=1e-6, abs=1e-3)
        assert left.sumsq == pytest.approx(right.sumsq, rel=1e-6)


def test_the_tensor_stays_as_it_was():
    x = values((64, 64), torch.float32).requires_grad_()
    y = x * 2
    before, copy, state = y._version, y.detach().clone(), torch.get_rng_state()
    stats_of(KERNELS[0], y)
    assert y._version == before and torch.equal(y, copy) and y.grad_fn is not None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(3, dtype=torch.complex64),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch._neg_view(torch.ones(3)),
    ],
    ids=["complex", "meta", "sparse", "negated"],
)
def test_what_the_kernel_cannot_read_is_left_alone(x):
    slot = torch.full((9,), -7, dtype=torch.int64)
    assert not Compiled(KERNELS[0])(x, slot.data_ptr())
    assert (slot == -7).all()
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    assert not Compiled(KERNELS[0])(freed, slot.data_ptr())
