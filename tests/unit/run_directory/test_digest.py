"""Digest and sketch: the same from kernel and twin, whole or in shards, and different for what is different."""

import itertools

import pytest
import torch

from msprobe_megatron.job.measure.compiled import Compiled
from msprobe_megatron.run_directory.digest import numbered_into
from msprobe_megatron.topology.index_map import index_map
from msprobe_megatron.topology.shards import ShardSpec, cut
from tests.unit.job.measure.kernels import DTYPES, kernels, layouts_of, values

KERNELS = kernels()
WORD = (1 << 64) - 1


def digest_by_hand(x):
    """The definition, in Python's own integers."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    total = 0
    for index, word in enumerate(x.contiguous().reshape(-1).view(bits).tolist()):
        key = ((index + 1) * 0x9E3779B97F4A7C15) & WORD
        key ^= key >> 32
        key = (key * 0xD6E8FEB86659FD93) & WORD
        key = (key ^ (key >> 29)) | 1
        mixed = ((word % (1 << (8 * x.element_size())) + 1) * 0xA0761D6478BD642F) & WORD
        mixed ^= mixed >> 32
        total += mixed * key
    return total & WORD


def by_twin(x, numbering=None, cells=0):
    digest, sketch = torch.zeros(1, dtype=torch.int64), torch.zeros(cells, dtype=torch.float64)
    numbered_into(x, numbering, digest, sketch)
    return digest.item() & WORD, sketch


def by_kernel(kernel, x, numbering=None, cells=0):
    slot = torch.full((10 + cells,), -7, dtype=torch.int64)
    assert Compiled(kernel, digest=True, sketch=cells)(x, slot.data_ptr(), numbering)
    return slot[9].item() & WORD, slot[10:].view(torch.float64)


def ways():
    return [by_twin, *(lambda *args, k=k, **kw: by_kernel(k, *args, **kw) for k in KERNELS)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_is_what_its_definition_says(dtype):
    for _, x in layouts_of(values((3, 4, 10), dtype)):
        want = digest_by_hand(x)
        assert all(way(x)[0] == want for way in ways())


SPECS = [
    ("s[tp] b h", (8, 3, 6)),
    ("s b h[tp]", (4, 3, 8)),
    ("s[cp:zigzag] b[dp:samples] h", (16, 2, 5)),
    ("s[cp:zigzag,tp] b h", (32, 2, 5)),
    ("d0[tp:gated] d1", (16, 7)),
    ("b n[tp] s[cp:zigzag] k", (2, 4, 8, 3)),
    ("d0[tp:packed 2,1,1] d1", (32, 3)),
    ("s[cp:zigzag 1,1,tp:packed 1,1] b", (64, 2)),
    ("d0[tp]", (12,)),
    ("v[tp] s[cp:zigzag]", (2, 8)),
]


def all_ranks(axes, sizes):
    for place in itertools.product(*(range(sizes[axis]) for axis in axes)):
        yield dict(zip(axes, place, strict=True))


@pytest.mark.parametrize("sizes", [{"tp": 1, "cp": 1}, {"tp": 2, "cp": 2}, {"tp": 4, "cp": 2}], ids=str)
@pytest.mark.parametrize(("text", "shape"), SPECS)
def test_shards_add_up(text, shape, sizes):
    spec = ShardSpec.parse(text)
    axes = [axis for axis in spec.cut_axes() if axis in sizes]
    if text.startswith("v") and sizes["tp"] > 2:
        pytest.skip("two rows")
    whole = values(shape, torch.float32)
    for way in ways():
        want, cells_wanted = way(whole, cells=16)
        total, cells = 0, torch.zeros(16, dtype=torch.float64)
        for place in all_ranks(axes, sizes):
            rank, size = (lambda axis, p=place: p.get(axis, 0)), (lambda axis: sizes.get(axis, 1))
            part = cut(whole, spec, rank, size)
            numbering = index_map(spec, part.shape, rank, size)
            digest, some = way(part, numbering, cells=16)
            total, cells = (total + digest) & WORD, cells + some
        assert total == want
        assert torch.allclose(cells, cells_wanted, atol=1e-9)


@pytest.mark.parametrize(("text", "shape"), [("d0[tp] d1", (8, 5)), ("d0 d1[tp]", (4, 8)), ("d0[tp:gated] d1", (8, 3))])
def test_ranges_of_the_optimizer_add_up(text, shape):
    """A flat range of a shard starts in the middle of a row and still finds its numbers."""
    spec, whole = ShardSpec.parse(text), values(shape, torch.float32)
    total = 0
    for tp in range(2):
        rank, size = (lambda axis, tp=tp: tp), (lambda axis: 2)
        part = cut(whole, spec, rank, size)
        edges = [0, 3, 7, 11, part.numel()]
        for low, high in itertools.pairwise(edges):
            numbering = index_map(ShardSpec(spec.dims, flat=(low, high)), part.shape, rank, size)
            total += by_twin(part.reshape(-1)[low:high], numbering)[0]
    assert total & WORD == by_twin(whole)[0]


def test_no_number_where_there_is_no_fixed_place():
    one = {"rank": lambda axis: 0, "size": lambda axis: 2}
    for text in ("?unknown", "x[ep:unordered] h", "d0; partial tp"):
        spec = ShardSpec.parse(text)
        assert index_map(spec, (4, 4)[: max(1, len(spec.dims))], **one) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_digest_sees_the_smallest_difference(dtype):
    x = values((64, 8), dtype) + 1
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    swapped = x.clone()
    swapped[[3, 17]] = swapped[[17, 3]]
    single = x.clone()
    single.view(bits)[5, 5] ^= 1
    both = x.flatten().clone()
    both[[0, 1]] = both[[1, 0]] if both[0] != both[1] else both[[0, 1]] + 1
    different = [x, swapped, single, both.view_as(x), torch.zeros_like(x), torch.ones_like(x), x[:-1], x.flip(0)]
    if dtype.is_floating_point:
        different.append(-torch.zeros_like(x))
    for way in ways():
        assert len({way(y)[0] for y in different}) == len(different)


def test_powers_of_two_that_change_places_are_seen():
    """Round numbers differ in their high bits only; every exchange of two of them must still show."""
    x = torch.ones(128, dtype=torch.float64)
    x[::2] = 2.0
    found = {by_twin(x)[0]}
    for k in range(0, 126, 2):
        y = x.clone()
        y[[k, k + 1]] = y[[k + 1, k]]
        found.add(by_twin(y)[0])
    assert len(found) == 64


@pytest.mark.parametrize("size", [2000, 50_000])
@pytest.mark.parametrize("noise", [1e-3, 0.1])
def test_sketches_estimate_the_difference(size, noise):
    errors = []
    for seed in range(21):
        torch.manual_seed(seed)
        x = torch.randn(size)
        y = x + noise * torch.randn(size)
        sketches = [ways()[-1](t, cells=256)[1] for t in (x, y)]
        true = ((x - y).double().norm() / x.double().norm()).item()
        estimate = ((sketches[0] - sketches[1]).norm() / sketches[0].norm()).item()
        errors.append(abs(estimate / true - 1))
    assert sorted(errors)[len(errors) // 2] < 0.1


def test_sketch_of_kernel_and_twin_agree_and_leave_out_what_is_not_finite():
    x = values((40, 50), torch.float32)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    clean = torch.where(torch.isfinite(x), x, 0)
    for way in ways():
        assert torch.allclose(way(x, cells=32)[1], by_twin(clean, cells=32)[1], atol=1e-9)
