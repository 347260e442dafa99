"""Statistics by torch alone, on a CPU without a compiler and on a device: right, few operations, and no trace left."""

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_megatron.job.measure import aten, operator
from msprobe_megatron.job.measure.flatten import compact, is_dense
from msprobe_megatron.job.measure.stats import Stats, flattened, measure, measure_into
from tests.unit.job.measure.kernels import DTYPES, layouts_of, values
from tests.unit.job.measure.oracle import assert_stats


def on_host(x: torch.Tensor, times: int = 1) -> Stats:
    floats, counts = torch.full((5,), math.nan, dtype=torch.float64), torch.full((4,), -1)
    aten.measure_on_host(x, times, floats, counts)
    return Stats(*floats.tolist(), *counts.tolist())


def blank(wide: bool) -> torch.Tensor:
    """The row of a slot that is not filled."""
    row = torch.full((9 if wide else 7,), -1)
    row.view(torch.float64 if wide else torch.float32)[:5].fill_(math.nan)
    return row


def on_device(x: torch.Tensor, times: int = 1, wide: bool = False) -> Stats:
    """As a device does it, and then the writer thread."""
    row = blank(wide)
    aten.measure_into_row(x, times, row, wide=wide)
    words = row.numpy()[None].copy()
    for _ in range(2):
        aten.finish(words, wide=wide)
    floats = words[0].view(np.float64 if wide else np.float32)[:5]
    return Stats(*floats.tolist(), *words[0][-4:].tolist())


def samples() -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    x = torch.randn(150_000)
    spoilt = x.clone()
    spoilt[::1000], spoilt[1::1000], spoilt[2::1000], spoilt[3::1000] = math.nan, math.inf, -math.inf, 0.0
    cases = {
        "normal": x,
        "spoilt": spoilt,
        "huge": x * 1e37,
        "tiny": x * 1e-33,
        "small": x[:100],
        "bfloat16": spoilt.bfloat16(),
        "float16": spoilt.half(),
        "float64": spoilt.double() * 1e200,
        "int64": (x * 1e5).long(),
        "bool": x > 0,
        "holes": spoilt.view(-1, 10)[:, 1:8],
        "all_nan": torch.full((70_000,), math.nan),
    }
    if hasattr(torch, "float8_e5m2"):
        cases["float8"] = spoilt.to(torch.float8_e5m2)
    return cases


@pytest.mark.parametrize("name", list(samples()))
@pytest.mark.parametrize("wide", [True, False], ids=["float64", "float32"])
def test_host_and_device_agree_with_numpy(name: str, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = samples()[name]
    host = on_host(x)
    if name == "float64":  # there 1e400 overflows
        assert host.sumsq == math.inf
        x = x * 1e-199
    else:
        assert_stats(host, x)
    if name in ("huge", "tiny"):  # squares beyond float32: said to be infinite, or zero
        found = on_device(x, wide=wide)
        assert found.sumsq in (0.0, math.inf)
        assert (found.min, found.max, *found[5:]) == (host.min, host.max, *host[5:])
        return
    rounded = x.float() if x.dtype is torch.float64 else x
    assert_stats(on_device(x, wide=wide), rounded, 2e-6)
    monkeypatch.setattr(aten, "PIECE", 40_000)  # several pieces, so that their merge is tested
    assert_stats(on_device(x, wide=wide), rounded, 2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout(dtype: torch.dtype) -> None:
    for _, x in layouts_of(values((3, 4, 5), dtype)):
        if x.numel():
            data, times = flattened(x)
            assert_stats(on_host(data, times), x)
            assert_stats(on_device(data, times), x.float() if dtype is torch.float64 else x)


@pytest.mark.parametrize("path", [on_host, on_device])
def test_repeats_multiply_sums_and_counts_only(path: Callable[..., Stats]) -> None:
    x = torch.tensor([1.0, -3.0, 0.0, math.nan, math.inf, -math.inf, math.inf])
    assert path(x, times=4) == Stats(-3.0, 1.0, -8.0, 40.0, 3.0, 4, 8, 4, 4)


def test_blank_rows_stay_blank_and_finished_rows_stay() -> None:
    for wide in (True, False):
        rows = torch.stack([blank(wide), blank(wide)]).numpy()
        rows[1, -4:] = (0, 0, 0, 3)
        before = rows.copy()
        aten.finish(rows, wide=wide)
        assert np.array_equal(rows, before)


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that reach ATen, and those that move data to another device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "_to_copy" and (kwargs or {}).get("device") not in (None, args[0].device):
            name = "moved to another device"
        self.names[name] += 1
        return func(*args, **(kwargs or {}))


# Another view of the same memory, or memory itself: no launch.
NO_LAUNCH = (
    "view",
    "slice",
    "select",
    "as_strided",
    "alias",
    "split",
    "unbind",
    "detach",
    "empty",
    "_reshape_alias",
    "view_as_real",
)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
@pytest.mark.parametrize("layout", ["whole", "turned", "holes", "row", "one"])
def test_at_most_six_operations_a_tensor(dtype: torch.dtype, layout: str) -> None:
    whole = values((3, 4, 5), torch.float32).to(dtype) if dtype.is_complex else values((3, 4, 5), dtype)
    x = dict(layouts_of(whole))[layout]
    rows = [blank(False) for _ in range(2)]
    for row in rows:
        with Calls() as calls:
            operator._by_torch(x.data, row, False, operator.STATISTICS, -1)
    launches = {name: count for name, count in calls.names.items() if name not in NO_LAUNCH}
    # Types that no sorting and no device takes are converted first.
    converted = dtype in (torch.float64, torch.uint16, torch.uint32, torch.uint64)
    assert sum(launches.values()) <= 6 + converted + (dtype is torch.uint64), launches
    for forbidden in ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "moved to another device"):
        assert calls.names[forbidden] == 0, calls.names


def test_no_float64_on_a_device() -> None:
    made: set[torch.dtype] = set()

    class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.update(r.dtype for r in (result if isinstance(result, tuple) else [result]) if r is not None)
            return result

    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn):
        row = blank(False)
        x = values((300,), dtype)
        aten.measure_into_row(x, 1, row, wide=False)  # tables exist from here on
        with Made():
            aten.measure_into_row(x, 1, row, wide=False)
    assert torch.float32 in made and torch.float64 not in made


@pytest.mark.parametrize("spoil", [False, True])
def test_leaves_no_trace(spoil: bool) -> None:
    torch.manual_seed(12)
    leaf = torch.randn(200, 300, requires_grad=True)
    if spoil:
        leaf.data[5, 5] = math.inf
    inner = leaf * 2
    turned = inner.t()
    before = [(t, t._version, t.detach().clone(), t.grad_fn, t.requires_grad) for t in (leaf, inner, turned)]
    rng, numpy_rng = torch.get_rng_state(), np.random.get_state(legacy=True)
    floats, counts = torch.empty(5, dtype=torch.float64), torch.empty(4, dtype=torch.int64)
    for tensor in (leaf, inner, turned, turned[3:, ::2], leaf.expand(3, 200, 300)):
        assert measure_into(tensor, floats, counts)
        operator._by_torch(tensor.data, blank(True), True, operator.STATISTICS, -1)
    assert torch.equal(rng, torch.get_rng_state()) and str(numpy_rng) == str(np.random.get_state(legacy=True))
    assert not floats.requires_grad and floats.grad_fn is None
    for tensor, version, value, grad_fn, requires in before:
        assert tensor._version == version and tensor.requires_grad is requires
        assert tensor.grad_fn is grad_fn and torch.equal(tensor.detach(), value)
    (grad,) = torch.autograd.grad(inner.sum(), leaf)
    assert torch.equal(grad, torch.full((200, 300), 2.0))


def test_threads_do_not_share_scratch() -> None:
    torch.manual_seed(13)
    tensors = [torch.randn(60_000) * (k + 1) for k in range(4)]
    found: list[set[Stats]] = [set() for _ in tensors]

    def work(k: int) -> None:
        for _ in range(50):
            found[k].add(measure(tensors[k]))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, x in enumerate(tensors):
        assert len(found[k]) == 1
        assert_stats(next(iter(found[k])), x)


@pytest.mark.parametrize("limit", [1, 10, 100, 10_000])
def test_pieces_hold_every_element_once_and_respect_the_limit(limit: int) -> None:
    x = torch.arange(5 * 6 * 7).view(5, 6, 7)[1:, ::2, 1:6]
    pieces = list(aten.pieces(x, limit))
    assert all(piece.numel() <= limit for piece in pieces)
    assert all(p.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for p in pieces)
    assert sorted(torch.cat([p.flatten() for p in pieces]).tolist()) == sorted(x.flatten().tolist())


def test_dense_means_one_gapless_stretch() -> None:
    x = torch.zeros(3, 4, 5)
    dense = [x, x.permute(2, 0, 1), x[1:], x.transpose(0, 1), torch.zeros(()), x[:, :1][:1]]
    holed = [x[:, 1:], x[..., ::2], torch.zeros(9).unfold(0, 3, 1)]
    assert [is_dense(t) for t in dense] == [True] * len(dense)
    assert [is_dense(t) for t in holed] == [False] * len(holed)


def test_compact_shares_memory_and_counts_repeats() -> None:
    x = torch.arange(12.0).view(3, 1, 4)
    once, times = compact(x.expand(3, 6, 4).transpose(0, 2))
    assert times == 6
    assert once.data_ptr() == x.data_ptr()
    assert sorted(once.flatten().tolist()) == x.flatten().tolist()
