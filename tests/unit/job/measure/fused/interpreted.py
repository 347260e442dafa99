"""The fused kernel against NumPy, against the definition of the digest, and against itself.

Run by test_kernel.py in a process of its own: whether Triton interprets is decided when it is first imported.
"""

import math

import pytest
import torch

from msprobe_megatron.job.measure.fused import launch
from msprobe_megatron.job.measure.fused import operator as fused
from msprobe_megatron.job.measure.operator import number_of
from msprobe_megatron.job.measure.stats import Stats
from msprobe_megatron.run_directory.digest import numbered_into
from tests.unit.job.measure.kernels import DTYPES, FLOATS, FP8, layouts_of, values
from tests.unit.job.measure.oracle import assert_stats

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, of integers that wrap around
CPU = torch.device("cpu")
INF, NAN = math.inf, math.nan
BOUND = 40 * 2.0**-24
FNUZ = [getattr(torch, n) for n in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu") if hasattr(torch, n)]
ALL = [*DTYPES, *FNUZ]


@pytest.fixture(scope="module")
def stream():
    return launch.Stream(CPU)


def measured(stream, x, cells=-1, wide=True, numbering=None):
    """Statistics, digest and cells of a tensor."""
    first = 5 if wide else 3
    row = torch.full((first + 4 + 1 + max(cells, 0),), -7, dtype=torch.int64)
    stream.measure(x, row, wide=wide, cells=cells, numbering=numbering)
    floats = row.view(torch.float64 if wide else torch.float32)
    assert cells >= 0 or row[first + 4] == -7
    found = floats[2 * (first + 5) if not wide else first + 5 :][: max(cells, 0)]
    return Stats(*floats[:5].tolist(), *row[first : first + 4].tolist()), int(row[first + 4]), found.to(torch.float64)


def defined(x, cells, numbering=None):
    digest, found = torch.zeros(1, dtype=torch.int64), torch.zeros(cells, dtype=torch.float64)
    numbered_into(x, numbering, digest, found)
    return int(digest), found


NARROW = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.float8_e4m3fn]


@pytest.mark.parametrize(("dtype", "wide"), [*((d, True) for d in ALL), *((d, False) for d in NARROW)], ids=str)
def test_every_dtype_and_layout(stream, dtype, wide):
    x = values((3, 4, 5), dtype)
    for name, view in layouts_of(x):
        for cells in (-1, 0, 3):
            found, digest, sketch = measured(stream, view, cells, wide)
            rounded = view.float() if dtype is torch.float64 and not wide else view
            assert_stats(found, rounded, 1e-12 if wide and dtype.itemsize == 8 else BOUND)
            if cells >= 0:
                want, wanted = defined(view, cells)
                assert digest == want, name
                assert torch.allclose(sketch, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [*FLOATS, *FP8], ids=str)
@pytest.mark.parametrize("kind", [[NAN], [INF], [-INF], [INF, -INF, NAN], [0.0, -0.0], [NAN, 1.0, -2.0], [-INF, -1.0]])
def test_values_that_are_not_finite(stream, dtype, kind):
    x = torch.tensor(kind, dtype=dtype).repeat(300)
    assert_stats(measured(stream, x)[0], x, 1e-6)


def test_every_eight_bit_float(stream):
    for dtype in ALL:
        if dtype.itemsize == 1 and dtype.is_floating_point:
            for byte in {*range(0, 256, 9), 0x7C, 0x7F, 0x80, 0xFC, 0xFF, 1, 2}:
                x = torch.tensor([byte], dtype=torch.uint8).view(dtype)
                assert_stats(measured(stream, x)[0], x.to(torch.float32), 0.0)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-25, 1e-13, 1.0, 1e12, 1e17, 1e25, 3e38])
def test_squares_that_float32_cannot_hold(stream, scale):
    x = torch.linspace(-1, 1, 5001, dtype=torch.float64).mul(scale).float()
    assert_stats(measured(stream, x)[0], x, BOUND)
    mixed = torch.cat((x, torch.ones(500), x[:7]))
    assert_stats(measured(stream, mixed)[0], mixed, BOUND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("size", [1, 15, 1023, 1024, 1025, 2048, 4096 + 1, 9001])
def test_whole_blocks_rests_and_several_chunks(stream, dtype, size):
    x = values((size + 1,), dtype, seed=size)
    for view in (x[:size], x[1:]):  # the second one begins where no vector does
        found, digest, _ = measured(stream, view, 0)
        assert_stats(found, view, BOUND)
        assert digest == defined(view, 0)[0]


@pytest.mark.parametrize("wide", [True, False], ids=["float64", "float32"])
def test_many_tiles_a_chunk_stay_within_the_bound(stream, wide, monkeypatch):
    """Few chunks, as of a tensor of a billion elements: every rounding of a running sum errs in the same direction."""
    monkeypatch.setattr(launch, "_MOST_CHUNKS", 1)
    fresh = launch.Stream(CPU)
    for dtype, tiles in ((torch.bfloat16, 60), (torch.float32, 400)):
        x = torch.full((tiles * 1024 + 5,), 1.1393333673477173).to(dtype)
        assert_stats(measured(fresh, x, wide=wide)[0], x, BOUND)
    # The same sum of a lane, carried on in float32 as it comes, is off by more.
    naive, one = torch.zeros(()), torch.tensor(1.1393333673477173)
    for _ in range(400):
        naive = naive + one * one
    assert abs(float(naive) / (400 * float(one) ** 2) - 1) > BOUND


def test_the_same_bits_in_every_run(stream):
    x = values((40, 33, 7), torch.bfloat16)
    found = {str(measured(stream, x, 8)) for _ in range(3)}
    assert len(found) == 1


NUMBERINGS = {
    "rows": ((10, ((0, 4, 20),)), (1, ((0, 10, 0),))),
    "columns": ((40, ((0, 4, 0),)), (1, ((0, 10, 30),))),
    "zigzag": ((10, ((0, 2, 0), (2, 2, 140))), (1, ((0, 10, 0),))),
    "both": ((30, ((0, 1, 60), (1, 3, 300))), (1, ((0, 5, 5), (5, 5, 20)))),
}


@pytest.mark.parametrize("name", NUMBERINGS)
def test_shards_are_numbered_in_the_whole_tensor(stream, name):
    x = values((4, 10), torch.float32)
    for view in (x, values((10, 4), torch.float32).t(), values((8, 20), torch.float32)[::2, ::2]):
        for cells in (0, 5):
            found, digest, sketch = measured(stream, view, cells, numbering=NUMBERINGS[name])
            want, wanted = defined(view, cells, NUMBERINGS[name])
            assert digest == want
            assert torch.allclose(sketch, wanted, rtol=1e-6, atol=1e-6)
            assert_stats(found, view, BOUND)


def test_a_huge_expanded_tensor_is_read_once(stream):
    x = torch.tensor([1.0, -2.0, 0.0, NAN]).view(4, 1).expand(4, 10**12)
    assert measured(stream, x)[0] == Stats(-2.0, 1.0, -(10.0**12), 5.0 * 10**12, 2.0, 10**12, 0, 0, 10**12)


def test_complex_numbers_are_their_parts(stream):
    x = torch.complex(values((3, 5), torch.float32), values((3, 5), torch.float32, 1))
    for view in (x, x.conj(), x.t(), x.conj().imag):
        found, digest, _ = measured(stream, launch.real(view, None)[0], 0)
        assert_stats(found, view, BOUND)
        assert digest == defined(view, 0)[0]


@pytest.mark.parametrize("wide", [True, False], ids=["float64", "float32"])
def test_many_tensors_in_one_launch_a_dtype(monkeypatch, wide):
    buffer = values((7000,), torch.float32)
    buffer[17], buffer[4000] = NAN, INF
    tensors = [buffer[:16], buffer[16:3016], buffer[3016:3017], buffer[3021:7000], buffer[:0]]
    tensors += [values((700,), torch.bfloat16), values((3, 3), torch.int64)]
    rows = torch.zeros((len(tensors), 9 if wide else 7), dtype=torch.int64)
    grids = []
    monkeypatch.setattr(launch.kernel, "measure_many", Counted(launch.kernel.measure_many, grids))
    table = launch.Table(tensors, [row.data_ptr() for row in rows], launch.Stream(CPU), wide=wide)
    for _ in range(2):
        rows.zero_()
        table()
        for tensor, row in zip(tensors, rows, strict=True):
            floats = row.view(torch.float64 if wide else torch.float32)[:5].tolist()
            assert_stats(Stats(*floats, *row[-4:].tolist()), tensor, BOUND)
    assert len(grids) == 2 * 4  # float32 where vectors begin and where not, bfloat16, int64


class Counted:
    def __init__(self, kernel, grids):
        self.kernel, self.grids = kernel, grids

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]


def test_the_operator_checks_the_kernel_before_it_is_trusted(monkeypatch):
    for wide in (True, False):
        assert fused.tells_the_truth(CPU, wide=wide)
    monkeypatch.setattr(launch.kernel, "measure_tensor", Silent())
    assert not fused.tells_the_truth(CPU, wide=True)


def test_the_operator_takes_what_probes_give_it():
    x = torch.complex(values((3, 4), torch.float32), values((3, 4), torch.float32, 1)).conj()
    numbering = ((8, ((0, 1, 3), (1, 2, 40))), (1, ((0, 4, 0),)))
    row = torch.zeros(7 + 1 + 4, dtype=torch.int64)
    fused.measure_into_slot(x, row, False, 4, number_of(numbering))
    want, cells = defined(x, 4, numbering)
    assert int(row[7]) == want
    assert torch.allclose(row[8:].view(torch.float32)[:4].double(), cells, rtol=1e-5, atol=1e-4)
    assert_stats(Stats(*row.view(torch.float32)[:5].tolist(), *row[3:7].tolist()), x, BOUND)


def test_tables_are_made_again_when_tensors_move():
    rows = [torch.zeros(9, dtype=torch.int64) for _ in range(2)]
    for seed in range(3):
        tensors = [values((n,), torch.float32, seed) for n in (5, 3000)]
        fused.measure_into_slots(tensors, rows, True)
        for x, row in zip(tensors, rows, strict=True):
            assert_stats(Stats(*row.view(torch.float64)[:5].tolist(), *row[5:].tolist()), x, BOUND)


def test_working_memory_is_bounded():
    """Under 4 MiB a stream, whatever is measured and however many tables there are."""
    stream = launch.Stream(CPU)
    for cells in (1, 64, 4096):
        stream._new_plan((torch.float32, (1 << 30,), (1,), 0, cells, True), torch.empty(1).expand(1 << 30), None)
    big = torch.empty(1).expand(1 << 34)
    many = [big[: 1 << 22]] * 200
    for tensors in ([big, big[: 1 << 33], big[:3]], many):
        launch.Table(tensors, [0] * len(tensors), stream, wide=True)
    memory = (stream._memory, stream._cells, stream._partials)
    assert sum(tensor.nbytes for tensor in memory) <= 4 << 20


class Silent:
    """A kernel that writes nothing."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None
