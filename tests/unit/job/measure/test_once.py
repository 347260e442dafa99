"""A tensor is taken for seen only while its memory is what it was."""

import gc
import weakref

import pytest
import torch

from msprobe_megatron.job.measure import once
from msprobe_megatron.job.measure.once import SeenTensors


@pytest.fixture
def seen() -> SeenTensors:
    return SeenTensors()


def test_same_memory_is_seen_through_any_python_object(seen: SeenTensors) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    assert seen.lookup(x) is None
    seen.remember(x, 17)
    assert seen.lookup(x) == 17
    assert seen.lookup(x.detach()) == 17
    assert seen.lookup(x.view(4, 6)) == 17
    assert seen.lookup(torch.nn.Parameter(x.detach())) == 17


def test_views_are_other_tensors(seen: SeenTensors) -> None:
    x = torch.arange(24.0).view(4, 6)
    seen.remember(x, 1)
    others = [
        x.t(),
        x[1:],
        x.view(6, 4),
        x[:, :3],
        x.view(torch.int32),
        x.view(24),
        x[::2],
        x.expand(2, 4, 6),
    ]
    assert [seen.lookup(other) for other in others] == [None] * len(others)
    for slot, other in enumerate(others, start=2):
        seen.remember(other, slot)
    assert [seen.lookup(other) for other in others] == list(range(2, 2 + len(others)))
    assert seen.lookup(x) == 1


def test_lazy_conjugate_and_negative_are_other_tensors(seen: SeenTensors) -> None:
    x = torch.randn(3, dtype=torch.complex64)
    seen.remember(x, 1)
    assert seen.lookup(x.conj()) is None
    seen.remember(x.imag, 2)
    assert seen.lookup(x.imag) == 2
    assert seen.lookup(x.conj().imag) is None


@pytest.mark.parametrize("through", ["tensor", "view", "base"])
def test_change_in_place_is_noticed(seen: SeenTensors, through: str) -> None:
    base = torch.zeros(10)
    x = base[2:8]
    seen.remember(x, 3)
    {"tensor": x, "view": x[1:3], "base": base}[through].add_(1)
    assert seen.lookup(x) is None
    seen.remember(x, 4)
    assert seen.lookup(x) == 4


def test_storage_freed_and_allocated_again_is_not_confused(seen: SeenTensors) -> None:
    """The allocator gives the same address again and again; the storage's identity must not come back."""
    addresses = set()
    for k in range(300):
        x = torch.full((1000,), float(k))
        addresses.add(x.data_ptr())
        assert seen.lookup(x) is None, f"round {k} was taken for an earlier tensor"
        seen.remember(x, k)
        assert seen.lookup(x) == k
        del x
    assert len(addresses) < 300, "the allocator never reused memory: this test shows nothing"


def test_data_swap_is_noticed(seen: SeenTensors) -> None:
    x = torch.zeros(5)
    seen.remember(x, 1)
    version = x._version
    x.data = torch.ones(5)
    assert x._version == version
    assert seen.lookup(x) is None


def test_keeps_no_memory_alive(seen: SeenTensors) -> None:
    x = torch.zeros(1 << 16)
    storage = once._weak(x.untyped_storage())
    python_object = weakref.ref(x)
    seen.remember(x, 1)
    del x
    gc.collect()
    assert python_object() is None
    assert once._expired(storage)
    assert len(seen) == 1


def test_autograd_graph_is_not_kept(seen: SeenTensors) -> None:
    leaf = torch.randn(8, requires_grad=True)
    inner = leaf * 2
    out = inner.sin()  # its node saves ``inner`` for backward
    saved = once._weak(inner.untyped_storage())
    seen.remember(out, 1)
    del inner
    assert not once._expired(saved)
    del out
    gc.collect()
    assert once._expired(saved)


def test_invalidate_by_tensor_forgets_all_that_shares_its_memory(seen: SeenTensors) -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    seen.remember(x, 1)
    seen.remember(x[2:], 2)
    seen.remember(y, 3)
    seen.invalidate([x[:1]])
    assert (seen.lookup(x), seen.lookup(x[2:]), seen.lookup(y)) == (None, None, 3)
    seen.invalidate([torch.zeros(1)])
    assert seen.lookup(y) == 3
    seen.invalidate()
    assert seen.lookup(y) is None and len(seen) == 0


def test_invalidate_with_unknown_memory_forgets_everything(seen: SeenTensors) -> None:
    x = torch.zeros(8)
    seen.remember(x, 1)
    seen.invalidate([torch.eye(2).to_sparse()])
    assert seen.lookup(x) is None


def test_writes_that_bump_no_version_need_invalidate(seen: SeenTensors) -> None:
    """Not a wish but the reason for ``invalidate``: should this ever fail, the rule can go."""
    x = torch.zeros(8)
    seen.remember(x, 1)
    x.data.add_(1)
    assert seen.lookup(x) == 1


def test_forget_all(seen: SeenTensors) -> None:
    x = torch.zeros(8)
    seen.remember(x, 1)
    seen.forget_all()
    assert seen.lookup(x) is None and len(seen) == 0


def test_inference_tensors_are_not_kept(seen: SeenTensors) -> None:
    with torch.inference_mode():
        x = torch.zeros(3)
    seen.remember(x, 1)
    assert seen.lookup(x) is None and len(seen) == 0


@pytest.mark.parametrize(
    "make",
    [lambda: torch.eye(3).to_sparse(), lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(3))],
    ids=["sparse", "fake"],
)
def test_odd_tensors_do_no_harm(seen: SeenTensors, make) -> None:  # type: ignore[no-untyped-def]
    assert seen.lookup(make()) is None


def test_freed_storages_are_let_go(seen: SeenTensors) -> None:
    kept = [torch.full((4,), float(k)) for k in range(100)]
    for slot, x in enumerate(kept):
        seen.remember(x, slot)
    for k in range(5000):
        seen.remember(torch.zeros(4), k)
    assert len(seen) <= 402
    assert [seen.lookup(x) for x in kept] == list(range(100))
