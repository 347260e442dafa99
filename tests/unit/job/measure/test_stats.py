"""Statistics against NumPy float64, for every dtype, layout and ugly value."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msprobe_megatron.job.measure import aten
from msprobe_megatron.job.measure.stats import COUNT_COLUMNS, FLOAT_COLUMNS, Stats, measurable, measure, measure_into
from tests.unit.job.measure.oracle import assert_stats, expected

INF, NAN = math.inf, math.nan
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FP8_NAMES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
FP8 = [getattr(torch, name) for name in FP8_NAMES if hasattr(torch, name)]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UINTS = [getattr(torch, n) for n in ("uint16", "uint32", "uint64") if hasattr(torch, n)]


def test_columns_are_those_of_the_row() -> None:
    assert Stats._fields == FLOAT_COLUMNS + COUNT_COLUMNS


@pytest.mark.parametrize("dtype", FLOATS + FP8, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (33, 65), (2, 3, 4, 5), (3, 70_000)], ids=str)
def test_floating_dtypes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x = (torch.randn(shape, dtype=torch.float64) * 3 + 0.5).to(dtype)
    assert_stats(measure(x), x)


@pytest.mark.parametrize("dtype", [*INTS, *UINTS, torch.bool], ids=str)
def test_integers_are_exact(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(2)
    low, high = (0, 2) if dtype is torch.bool else (max(-100, torch.iinfo(dtype).min), 100)
    x = torch.from_numpy(rng.integers(low, high, size=(101, 977))).to(dtype)
    assert_stats(measure(x), x, relative=0.0)


def test_large_token_ids_are_exact() -> None:
    x = torch.full((100_003,), 2**31 - 1, dtype=torch.int64)
    assert measure(x).sum == float((2**31 - 1) * 100_003)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex_is_measured_as_its_parts(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = torch.randn(40, 50, dtype=torch.complex64).to(dtype)
    x[0, 0] = torch.tensor(complex(NAN, INF), dtype=dtype)
    assert_stats(measure(x), x)
    assert_stats(measure(x.conj()), x.conj())
    assert measure(x.conj().imag).sum == pytest.approx(-measure(x.imag).sum)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "values",
    [[NAN], [INF], [-INF], [INF, -INF, NAN], [0.0, -0.0], [NAN, 1.0, -2.0], [INF, 0.0], [-INF, -1.0], [-0.0]],
    ids=str,
)
def test_non_finite_values_hide_nothing(dtype: torch.dtype, values: list[float]) -> None:
    for repeat in (1, 50_000):
        x = torch.tensor(values, dtype=dtype).repeat(repeat)
        assert_stats(measure(x), x)


def test_one_nan_among_many_leaves_the_rest_measured() -> None:
    torch.manual_seed(4)
    x = torch.randn(300_000)
    x[123_456] = NAN
    x[7] = INF
    found = measure(x)
    assert_stats(found, x)
    assert (found.n_nan, found.n_posinf, found.n_neginf) == (1, 1, 0)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)], ids=str)
def test_empty_is_neutral(shape: tuple[int, ...]) -> None:
    assert measure(torch.empty(shape)) == Stats(INF, -INF, 0.0, 0.0, -INF, 0, 0, 0, 0)


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e-13, 1e12, 1e17, 1e25, 3e38])
def test_squares_that_float32_cannot_hold(scale: float) -> None:
    x = torch.linspace(-1, 1, 5001, dtype=torch.float64).mul(scale).float()
    assert_stats(measure(x), x)


def test_ten_million_elements_of_one_sign() -> None:
    x = torch.full((10_000_000,), 0.1)  # the worst case for naive summation: every rounding errs the same way
    assert_stats(measure(x), x)
    x[:5_000_000] = torch.rand(5_000_000, generator=torch.Generator().manual_seed(5))
    assert_stats(measure(x), x)


def test_sum_that_cancels_is_good_against_its_magnitudes() -> None:
    torch.manual_seed(6)
    half = torch.randn(200_000) * 1e4
    x = torch.cat((half, -half, torch.ones(3)))[torch.randperm(400_003)]
    assert_stats(measure(x), x)


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "transposed": x.permute(2, 0, 1),
        "sliced": x[:, 1:-1:2, 3:],
        "strided": x[..., ::3],
        "expanded": x[:, :1].expand(x.size(0), 9, x.size(2)),
        "expanded_and_sliced": x[:, 2:3, 1:-1].expand(x.size(0), 5, x.size(2) - 2),
        "expanded_scalar": x[0, 0, 0].expand(4, 5),
        "diagonal": x[0].diagonal(),
        "windows": x.reshape(-1).unfold(0, 8, 3),
        "offset": x.reshape(-1)[5:],
    }


@pytest.mark.parametrize("size", [(4, 6, 10), (8, 96, 190)], ids=["small", "several_pieces"])
@pytest.mark.parametrize("name", list(layouts(torch.zeros(4, 6, 10))))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_layouts(size: tuple[int, int, int], name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    x = layouts((torch.randn(size) * 9).to(dtype))[name]
    assert_stats(measure(x), x)


def test_huge_expanded_tensor_is_not_materialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "HOST_PIECE", 4)  # hours, if it were read as large as it looks
    x = torch.tensor([1.0, -2.0, 0.0, NAN]).view(4, 1).expand(4, 10**12)
    assert measure(x) == Stats(-2.0, 1.0, -(10.0**12), 5.0 * 10**12, 2.0, 10**12, 0, 0, 10**12)


def freed_storage() -> torch.Tensor:
    x = torch.ones(8)
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        freed_storage,
        lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(3)),
        lambda: torch.ones(2).to_mkldnn(),
    ],
    ids=["meta", "coo", "csr", "quantised", "freed", "fake", "mkldnn"],
)
@pytest.mark.filterwarnings("ignore")
def test_not_measurable_leaves_the_slots(make) -> None:  # type: ignore[no-untyped-def]
    floats, counts = torch.full((5,), 7.0, dtype=torch.float64), torch.full((4,), 7)
    x = make()
    assert not measurable(x)
    assert measure_into(x, floats, counts) is False
    assert floats.eq(7).all() and counts.eq(7).all()


def test_measure_says_what_it_accepts() -> None:
    with pytest.raises(ValueError, match="meta.*accepted: strided"):
        measure(torch.ones(3, device="meta"))


def test_tensors_inside_a_function_transform_are_not_measured() -> None:
    answers = []

    def f(row: torch.Tensor) -> torch.Tensor:
        answers.append(measurable(row))
        return row * 2

    torch.func.vmap(f)(torch.ones(3, 2))
    assert answers == [False]


def test_subclass_that_only_adds_attributes_is_measured() -> None:
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError("the measurement must not go through the subclass")

    plain = torch.arange(6.0)
    with torch._C.DisableTorchFunctionSubclass():
        tagged = plain.as_subclass(Tagged)
        kind = type(tagged)
    floats, counts = torch.empty(5, dtype=torch.float64), torch.empty(4, dtype=torch.int64)
    assert kind is Tagged
    assert measure_into(tagged, floats, counts)
    assert floats.tolist() == [0.0, 5.0, 15.0, 55.0, 5.0]


def test_parameter_in_inference_mode_and_after() -> None:
    x = torch.nn.Parameter(torch.arange(4.0))
    with torch.inference_mode():
        inside = measure(x)
        also = measure(torch.arange(4.0))
    assert inside == also == measure(x) == Stats(0.0, 3.0, 6.0, 14.0, 3.0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    "surroundings",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        torch.no_grad,
        torch.enable_grad,
        torch.autograd.detect_anomaly,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: 1 / 0, lambda t: t),
    ],
    ids=["autocast", "default_device", "no_grad", "enable_grad", "anomaly", "saved_tensors"],
)
@pytest.mark.filterwarnings("ignore:Anomaly")
def test_what_surrounds_training_does_not_change_the_figures(surroundings) -> None:  # type: ignore[no-untyped-def]
    x = torch.linspace(-1.0, 1.0, 100_001, requires_grad=True)
    floats, counts = torch.empty(5, dtype=torch.float64), torch.empty(4, dtype=torch.int64)
    with surroundings():
        assert measure_into(x, floats, counts)
    assert_stats(Stats(*floats.tolist(), *counts.tolist()), x)


SPECIAL = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 65504.0, -3e38, 1e-40, 1e-300, 1e300, 0.1, 3.0]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([*FLOATS, *FP8]))
    permuted, strided, expanded = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    numel = math.prod(shape)
    value = st.one_of(st.sampled_from(SPECIAL), st.floats(-1e6, 1e6, width=32))
    values = draw(st.lists(value, min_size=numel, max_size=numel))
    x = torch.tensor(values, dtype=torch.float64).reshape(shape).to(dtype)
    if shape and permuted:
        x = x.permute(draw(st.permutations(range(len(shape)))))
    if shape and strided:
        x = x[:: draw(st.integers(1, 3))]
    if expanded:
        x = x.unsqueeze(0).expand(draw(st.integers(1, 3)), *x.shape)
    return x


@settings(max_examples=300, deadline=None)
@given(tensors())
def test_any_tensor(x: torch.Tensor) -> None:
    if math.isinf(expected(x).sumsq):
        assert measure(x).sumsq == INF
    else:
        assert_stats(measure(x), x)
