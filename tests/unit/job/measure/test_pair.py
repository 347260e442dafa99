"""Two results compared: every figure against NumPy in float64, through the kernel and through torch."""

import numpy as np
import pytest
import torch

from msprobe_megatron.job.measure import exact, native, pair

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FLOOR = 1e-2


def two_results(dtype, size=5003):
    torch.manual_seed(size)
    live = torch.randn(size).to(dtype)
    other = live.clone()
    other[7::13] = (other[7::13] * 1.25).to(dtype)
    other[5] = -other[5] - 1
    live[1], other[2], live[3], other[4] = torch.nan, torch.nan, torch.inf, -torch.inf
    live[6] = other[6] = torch.inf
    live[8] = other[8] = torch.nan
    return live, other


def expected(live, other, floor):
    x, y = live.double().numpy(), other.double().numpy()
    bits = round(-np.log2(torch.finfo(live.dtype).eps))
    finite = np.isfinite(x) & np.isfinite(y)
    a, b = x[finite], y[finite]
    apart, size = abs(a - b), np.maximum(abs(a), abs(b))
    least = np.log2(torch.finfo(live.dtype).smallest_normal)
    unit = np.exp2(np.maximum(np.floor(np.log2(size)), least) - bits)
    quotient = np.maximum(abs(a), floor) / np.maximum(abs(b), floor)
    known = ~(np.isnan(x) | np.isnan(y))
    return {
        "elements": len(x),
        "nan_live": np.isnan(x).sum(),
        "nan_apart": (np.isnan(x) != np.isnan(y)).sum(),
        "inf_live": np.isinf(x).sum(),
        "inf_apart": (known & (np.isinf(x) | np.isinf(y)) & (x != y)).sum(),
        "different": (apart > 0).sum(),
        "max_abs": apart.max(),
        "where": np.flatnonzero(finite)[(apart / unit).argmax()],
        "diff_squares": (apart**2).sum(),
        "live_squares": None,
        "max_ulp": (apart / unit).max(),
        "ratio": max(quotient.max(), 1 / quotient.min()),
        "flipped": float((a * b).min() < -(floor**2)),
    }


@pytest.mark.parametrize("way", ["kernel", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_figure(dtype, way, monkeypatch):
    live, other = two_results(dtype)
    out = torch.empty(pair.COUNT, dtype=torch.float64)
    if way == "torch":
        monkeypatch.setattr(pair, "_PIECE", 512)
        monkeypatch.setattr(pair.library, "kernel", lambda: None)
    elif native.load() is None:
        pytest.skip(native.library.why_not())
    pair.compare(live, other, out, FLOOR)
    figures = dict(zip(pair.NAMES, out.tolist(), strict=True))
    for name, value in expected(live, other, FLOOR).items():
        if value is not None:
            assert figures[name] == pytest.approx(value, rel=1e-9), name


def test_layouts_that_differ_are_compared_by_element():
    native.load()
    live = torch.randn(6, 8)
    other = live.t().contiguous().t()
    out = torch.empty(pair.COUNT, dtype=torch.float64)
    pair.compare(live, other, out)
    assert out[pair.NAMES.index("different")] == 0
    pair.compare(live[:, ::2], other[:, ::2] + 1, out)
    assert out[pair.NAMES.index("different")] == 24


LAYOUTS = {
    "rows": lambda x: x.view(41, 122),
    "turned": lambda x: x.view(122, 41).t(),
    "with holes": lambda x: torch.stack([x, x], -1).view(41, 122, 2)[..., 0],
    "one row": lambda x: x.view(1, 41, 122).transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("way", ["kernel", "torch"])
@pytest.mark.parametrize("theirs", LAYOUTS)
@pytest.mark.parametrize("ours", LAYOUTS)
def test_every_figure_of_unlike_layouts_in_pieces(ours, theirs, way, monkeypatch):
    monkeypatch.setattr(pair, "_PIECE", 300)
    if way == "torch":
        monkeypatch.setattr(pair.library, "kernel", lambda: None)
    elif native.load() is None:
        pytest.skip(native.library.why_not())
    live, other = two_results(torch.float32, 41 * 122)
    # The same elements at the same indices, whatever the layout.
    live, other = LAYOUTS[ours](live).reshape(41, 122), LAYOUTS[theirs](other).reshape(41, 122)
    out = torch.empty(pair.COUNT, dtype=torch.float64)
    pair.compare(live, other, out, FLOOR)
    figures = dict(zip(pair.NAMES, out.tolist(), strict=True))
    wanted = expected(live.reshape(-1), other.reshape(-1), FLOOR)
    if live.stride() == other.stride() and not live.is_contiguous():
        wanted["where"] = None  # counted as it lies in memory
    for name, value in wanted.items():
        if value is not None:
            assert figures[name] == pytest.approx(value, rel=1e-9), name


def test_an_expanded_tensor_is_read_within_its_memory():
    native.load()
    one = torch.tensor(3.0)
    out = torch.empty(pair.COUNT, dtype=torch.float64)
    for live, other in ((one.expand(64), torch.full((64,), 3.0)), (torch.full((8, 8), 3.0), one.expand(8, 8))):
        pair.compare(live, other, out)
        assert out[pair.NAMES.index("different")] == out[pair.NAMES.index("nan_apart")] == 0
        assert out[pair.NAMES.index("live_squares")] == 64 * 9


@pytest.mark.parametrize("way", ["kernel", "torch"])
def test_a_result_of_16_bits_against_one_of_32(way, monkeypatch):
    monkeypatch.setattr(pair, "_PIECE", 300)
    if way == "torch":
        monkeypatch.setattr(pair.library, "kernel", lambda: None)
    live, other = two_results(torch.float32)
    live = live.bfloat16()
    out = torch.empty(pair.COUNT, dtype=torch.float64)
    pair.compare(live, other, out, FLOOR)
    figures = dict(zip(pair.NAMES, out.tolist(), strict=True))
    for name, value in expected(live.float(), other, FLOOR).items():
        if value is not None:
            assert figures[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize("scrambled", [False, True])
@pytest.mark.parametrize("shape", [(16, 33), (7,), (), (3, 3000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_rows_against_the_exact_ones(dtype, shape, scrambled):
    torch.manual_seed(1)
    true = torch.randn(shape, dtype=torch.float64) * 5
    live = true.to(dtype)
    if live.numel() > 6:
        live.view(-1)[3], live.view(-1)[5], true.view(-1)[6] = torch.nan, torch.inf, 1e300
        live.view(-1)[2] *= 1.5
    nudged = true * (1 + 1e-6 * torch.randn(shape, dtype=torch.float64))
    if live.numel() > 6:
        nudged.view(-1)[6] = 1e300  # an answer as large would excuse everything
    other = torch.randn(shape, dtype=torch.float64) if scrambled else None
    limits = exact.Limits(1.0, 4.0, 1e-7)
    plain = exact._with_torch(live, true, nudged - true, limits, other)
    if live.numel() > 6:
        assert plain[exact.NAMES.index("nan_apart")] == 1
        assert plain[exact.NAMES.index("inf_apart")] == 1
        assert plain[exact.NAMES.index("over")] > 1
    if native.load() is not None:
        out = torch.empty(len(exact.NAMES), dtype=torch.float64)
        exact.compare(live, true, nudged, limits, out, other)
        assert out.tolist() == pytest.approx(plain.tolist(), rel=1e-9)
