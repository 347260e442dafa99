"""The fast CPU path and the generic path: equal results, and neither leaves a trace on what it measures."""

import math
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_megatron.measure import cpu, generic
from msprobe_megatron.measure.flatten import compact, flat_pieces, is_dense
from msprobe_megatron.measure.stats import Stats, measure, measure_into

from .oracle import assert_stats

PATHS = {"cpu": cpu.measure_cpu, "generic": generic.measure_generic}


def slots(wide: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((5,), math.nan, dtype=wide), torch.full((4,), -1)


def run(path: str, x: torch.Tensor, times: int = 1, wide: torch.dtype = torch.float64) -> Stats:
    floats, counts = slots(wide)
    PATHS[path](x, times, floats, counts)
    return Stats(*floats.tolist(), *counts.tolist())


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
def test_both_paths_agree_with_each_other_and_with_numpy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generic, "PIECE", 40_000)  # several pieces, so that their merge is tested
    x = samples()[name]
    fast, plain = run("cpu", x), run("generic", x)
    if name != "float64":  # there 1e400 overflows: both must say so
        assert_stats(fast, x)
        assert_stats(plain, x)
        assert fast.sumsq == pytest.approx(plain.sumsq, rel=1e-6)
    else:
        assert fast.sumsq == plain.sumsq == math.inf
    assert (fast.min, fast.max, fast.absmax, *fast[5:]) == (plain.min, plain.max, plain.absmax, *plain[5:])


@pytest.mark.parametrize("path", PATHS)
def test_repeats_multiply_sums_and_counts_only(path: str) -> None:
    x = torch.tensor([1.0, -3.0, 0.0, math.nan, math.inf, -math.inf, math.inf])
    assert run(path, x, times=4) == Stats(-3.0, 1.0, -8.0, 40.0, 3.0, 4, 8, 4, 4)


def test_generic_accumulates_in_the_dtype_of_the_slots() -> None:
    x = torch.full((3,), 1e30)
    assert run("generic", x, wide=torch.float32).sumsq == math.inf
    assert run("generic", x, wide=torch.float64).sumsq == pytest.approx(3e60)


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


@pytest.mark.parametrize("name", list(samples()))
@pytest.mark.parametrize("path", ["measure_into", *PATHS])
def test_no_host_read_and_no_move(name: str, path: str) -> None:
    x = samples()[name]
    floats, counts = slots()
    measure_into(x, floats, counts)  # scratch memory exists from here on
    with Calls() as calls:
        if path == "measure_into":
            measure_into(x, floats, counts)
        else:
            PATHS[path](x, 1, floats, counts)
    assert calls.names["copy_"] >= 1  # the mode did see the work
    for forbidden in (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "is_nonzero",
        "equal",
        "moved to another device",
    ):
        assert calls.names[forbidden] == 0, calls.names


def test_a_small_tensor_costs_eight_operations() -> None:
    """Not a time, but what the time of small tensors is made of."""
    x = torch.randn(32, 2, 64)
    floats, counts = slots()
    measure_into(x, floats, counts)
    with Calls() as calls:
        measure_into(x, floats, counts)
    assert calls.names == {"copy_": 3, "aminmax": 1, "mul": 1, "eq": 1, "sum": 1, "detach": 1}


@pytest.mark.parametrize("path", ["cpu", "generic"])
@pytest.mark.parametrize("spoil", [False, True])
def test_leaves_no_trace(path: str, spoil: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "generic":
        monkeypatch.setattr("msprobe_megatron.measure.stats.measure_cpu", generic.measure_generic)
    torch.manual_seed(12)
    leaf = torch.randn(200, 300, requires_grad=True)
    if spoil:
        leaf.data[5, 5] = math.inf
    inner = leaf * 2
    turned = inner.t()
    before = [(t, t._version, t.detach().clone(), t.grad_fn, t.requires_grad) for t in (leaf, inner, turned)]
    rng, numpy_rng = torch.get_rng_state(), np.random.get_state(legacy=True)
    floats, counts = slots()
    for tensor in (leaf, inner, turned, turned[3:, ::2], leaf.expand(3, 200, 300)):
        assert measure_into(tensor, floats, counts)
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


def test_kept_views_stay_bounded() -> None:
    scratch = cpu._Scratch(torch.float32)
    for numel in range(1, 2 * cpu._VIEWS_KEPT):
        scratch.cut(torch.Size((numel,)))
    assert 0 < len(scratch.views) <= cpu._VIEWS_KEPT


@pytest.mark.parametrize("limit", [1, 10, 100, 10_000])
def test_pieces_hold_every_element_once_and_respect_the_limit(limit: int) -> None:
    x = torch.arange(5 * 6 * 7).view(5, 6, 7)[1:, ::2, 1:6]
    pieces = list(flat_pieces(x, limit))
    assert all(piece.dim() == 1 and piece.is_contiguous() for piece in pieces)
    copied = [p.numel() for p in pieces if p.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()]
    assert max(copied, default=0) <= limit
    assert sorted(torch.cat(pieces).tolist()) == sorted(x.flatten().tolist())


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
