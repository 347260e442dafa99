"""Elementwise figures against NumPy in float64: every dtype, strides, cuts, and numbers that are not finite."""

import numpy as np
import pytest

from msprobe_megatron.analysis.compare.pairs import elements
from msprobe_megatron.analysis.compare.pairs.assembly import meet, part_of
from msprobe_megatron.analysis.compare.pairs.elements import Apart, View, add_views, first_beyond, pieces
from msprobe_megatron.topology.shards import ShardSpec, cut

torch = pytest.importorskip("torch")
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_NAMES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.bool: "BOOL"}


def view_of(x):
    """A tensor as it lies in a file; torch's own words for it, not ours."""
    if x.dtype is torch.bfloat16:
        return View("BF16", x.contiguous().view(torch.int16).numpy().view("<u2"))
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return View(_NAMES[x.dtype], x.contiguous().view(torch.uint8).numpy())
    return View(_NAMES[x.dtype], x.contiguous().numpy())


def measured(x, y, ratio=1.0):
    apart = Apart()
    add_views(apart, view_of(x), view_of(y), (0,) * x.dim(), ratio)
    return apart


def expected(x, y, ratio=1.0):
    a, b = x.double().numpy(), y.double().numpy() * ratio
    d = a - b
    return {
        "relative": np.linalg.norm(d) / max(np.linalg.norm(a), np.linalg.norm(b)),
        "largest": np.abs(d).max(),
        "largest_at": tuple(int(i) for i in np.unravel_index(np.abs(d).argmax(), d.shape)),
        "cosine": (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b),
        "differing": int((a != b).sum()),
    }


def agree(apart, wanted):
    assert apart.relative == pytest.approx(wanted["relative"], rel=1e-5)
    assert apart.largest == pytest.approx(wanted["largest"], rel=1e-6)
    assert apart.largest_at == wanted["largest_at"]
    assert apart.cosine == pytest.approx(wanted["cosine"], abs=3e-6)
    assert apart.differing == wanted["differing"]
    assert apart.unlike == 0


@pytest.mark.parametrize("left", list(_NAMES))
@pytest.mark.parametrize("right", [torch.float32, torch.bfloat16, torch.float16])
def test_figures_of_every_dtype(left, right):
    torch.manual_seed(0)
    x = torch.randn(40, 3, 700)
    y = x + 0.1 * torch.randn_like(x)
    x, y = x.to(left), y.to(right)
    agree(measured(x, y), expected(x, y))


def test_the_smallest_half_numbers():
    x = torch.arange(-1024, 1024, dtype=torch.float64).mul(2.0**-24).half()
    agree(measured(x, x.flip(0)), expected(x, x.flip(0)))


def test_equal_tensors_are_equal_and_their_norm_is_known():
    x = torch.randn(1000)
    apart = measured(x, x.clone())
    assert (apart.differing, apart.squares, apart.largest_at, apart.cosine) == (0, 0.0, None, 1.0)
    assert apart.squares_x == pytest.approx(float((x.double() ** 2).sum()), rel=1e-6)


def test_large_numbers_do_not_overflow():
    x = torch.randn(500).mul(1e30).bfloat16()
    y = (x.float() * 1.01).bfloat16()
    agree(measured(x, y), expected(x, y))


def test_gradients_of_another_scale():
    x = torch.randn(300)
    y = x * 3 + 0.001
    agree(measured(x, y, ratio=1 / 3), expected(x, y, ratio=1 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_must_be_so_in_both(dtype):
    x = torch.randn(100).to(dtype)
    y = x.clone()
    x[3], y[3] = torch.nan, torch.nan
    x[4], y[4] = torch.inf, torch.inf
    assert (measured(x, y).unlike, measured(x, y).relative) == (0, 0.0)
    y[4], y[5], x[6] = -torch.inf, torch.nan, torch.nan
    apart = measured(x, y)
    assert (apart.unlike, apart.relative) == (3, np.inf)


def test_no_elements_and_one():
    empty, one = torch.zeros(0, 3), torch.tensor(2.0)
    assert (measured(empty, empty).numel, measured(empty, empty).cosine) == (0, 1.0)
    apart = measured(one, torch.tensor(3.0))
    assert (apart.largest, apart.largest_at, apart.relative) == (1.0, (), pytest.approx(1 / 3))


@pytest.mark.parametrize("shape", [(7,), (1000,), (3, 5), (4, 300), (5, 7, 11), (2, 3, 400), ()])
def test_pieces_cover_everything_once(shape, monkeypatch):
    monkeypatch.setattr(elements, "PIECE", 64)
    seen = np.zeros(shape, int)
    for piece in pieces(shape):
        seen[piece] += 1
        assert seen[piece].size <= 64
    assert (seen == 1).all()


def test_the_first_element_beyond_a_limit():
    x = torch.zeros(10, 10)
    y = x.clone()
    y[1, 2], y[3, 4], y[5, 6] = 0.1, 2.0, torch.nan
    assert first_beyond(view_of(x), view_of(y), (0, 0), 0.0) == (1, 2)
    assert first_beyond(view_of(x), view_of(y), (100, 0), 1.0) == (103, 4)
    assert first_beyond(view_of(x), view_of(y), (0, 0), 5.0) == (5, 6)
    assert first_beyond(view_of(x), view_of(x), (0, 0), 0.0) is None


# Cuts: the oracle is `topology.shards.cut`, which makes the shards from the whole tensor.


def shards_of(whole, text, sizes, flats=None):
    """All shards of a tensor, as parts."""
    spec = ShardSpec.parse(text)
    axes = [
        a for a in spec.cut_axes() if not any(c.order == "samples" and c.axis == a for d in spec.dims for c in d.cuts)
    ]
    found = []
    for place in np.ndindex(*(sizes[axis] for axis in axes)):
        where = dict(zip(axes, map(int, place), strict=True))
        for flat in flats or [None]:
            one = spec if flat is None else ShardSpec(spec.dims, flat)
            shard = cut(whole, one, lambda a, w=where: w.get(a, 0), lambda a: sizes.get(a, 1))
            found.append(part_of(view_of(shard), one, tuple(whole.shape), where, sizes, None))
    return found


@pytest.mark.parametrize(
    ("left", "right", "sizes", "flats"),
    [
        ("a b c", "a[tp] b c", {"tp": 2}, None),
        ("a[cp:zigzag,tp] b c", "a b c[tp]", {"tp": 2, "cp": 2}, None),
        ("a[tp:gated] b c", "a[cp:zigzag] b c", {"tp": 2, "cp": 4}, None),
        ("a b c", "a b c", {}, [(0, 100), (100, 333), (333, 768)]),
        ("a[tp] b c", "a b c", {"tp": 2}, [(0, 100), (100, 768)]),
        ("a[tp] b c", "b a c[tp]", {"tp": 2}, None),
    ],
)
def test_shards_meet_without_being_put_together(left, right, sizes, flats):
    torch.manual_seed(1)
    x = torch.randn(16, 6, 8)
    y = x + 0.1 * torch.randn_like(x)
    other = y.transpose(0, 1).contiguous() if right.startswith("b") else y
    apart = Apart()
    met = meet(shards_of(x, left, sizes), shards_of(other, right, sizes, flats))
    for a, b, at in met:
        add_views(apart, a, b, at)
    wanted = expected(x, y)
    if flats:
        wanted["largest_at"] = (int(np.ravel_multi_index(wanted["largest_at"], x.shape)),)
    assert apart.numel == x.numel()
    agree(apart, wanted)


def test_a_missing_shard_is_no_agreement():
    x = torch.randn(16, 6, 8)
    parts = shards_of(x, "a[tp] b c", {"tp": 2})
    assert meet(parts[:1], parts) is None
    assert meet(parts, [*shards_of(torch.randn(16, 6, 4), "a b c", {})]) is None
