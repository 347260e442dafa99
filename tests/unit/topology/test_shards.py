import numpy as np
import pytest
import torch

from msprobe_megatron.topology.shards import ShardSpec, cut


@pytest.mark.parametrize(
    "text",
    [
        "s[cp:zigzag,tp] b[dp:samples] h",
        "d0[tp:gated] d1",
        "d0[tp] d1; flat 128:256",
        "d0; partial tp cp",
        "s*b[cp:zigzag,tp,dp:samples] e",
        "d0[tp:packed 128,128,16] d1",
        "s[cp:zigzag 1,1,tp:packed 1,1] b n[tp:groups 2] d",
        "",
        "?experts grouped in one tensor",
    ],
)
def test_text_form_round_trips(text):
    assert str(ShardSpec.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["s[cp:backwards]", "s[", "a b; other", "a-b", "a[tp:packed]", "a[tp:groups 2,3]", "a[tp:packed 0,1]"]
)
def test_nonsense_is_refused_and_quoted(text):
    with pytest.raises(ValueError, match="shard spec"):
        ShardSpec.parse(text)


def _parts(whole, spec, sizes):
    """All parts by all coordinates, in the order of the axes given."""
    axes = list(sizes)
    for index in np.ndindex(*sizes.values()):
        at = dict(zip(axes, index, strict=True))
        yield at, cut(whole, spec, at.__getitem__, lambda a: sizes.get(a, 1))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("d0[tp] d1", {"tp": 4}),
        ("d0 d1[tp]", {"tp": 2}),
        ("d0[tp:gated] d1", {"tp": 4}),
        ("d0[cp:zigzag] d1", {"cp": 4}),
        ("d0[cp:zigzag,tp] d1[etp]", {"cp": 2, "tp": 2, "etp": 2}),
        ("d0[tp:packed 4,8,4] d1", {"tp": 4}),
        ("d0[cp:zigzag 1,1,tp:packed 1,1] d1", {"cp": 2, "tp": 2}),
    ],
)
def test_parts_tile_the_whole_exactly(text, sizes):
    whole = torch.arange(16 * 8).reshape(16, 8)
    spec = ShardSpec.parse(text)
    seen = []
    for _, part in _parts(whole, spec, sizes):
        assert spec.global_shape(part.shape, sizes.get) == (16, 8)
        seen.extend(part.reshape(-1).tolist())
    assert sorted(seen) == list(range(16 * 8))


def test_zigzag_is_megatrons_order():
    # Megatron gives rank r the chunks r and 2*cp-1-r of 2*cp (get_batch_on_this_cp_rank).
    sequence = torch.arange(12)
    spec = ShardSpec.parse("s[cp:zigzag]")
    assert cut(sequence, spec, lambda a: 1, lambda a: 3).tolist() == [2, 3, 8, 9]


def test_gated_keeps_gate_and_up_of_the_same_columns_together():
    weight = torch.arange(8)  # gate 0..3, up 4..7
    spec = ShardSpec.parse("d0[tp:gated]")
    assert cut(weight, spec, lambda a: 1, lambda a: 2).tolist() == [2, 3, 6, 7]


def test_packed_tensors_are_cut_one_by_one_whatever_sizes_are_in_proportion():
    # Mamba's [z | x | dt] with 4, 8 and 2 rows; rank 1 of 2 holds the second half of each.
    weight = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17, 20, 21])
    for sizes in ("4,8,2", "2,4,1"):
        part = cut(weight, ShardSpec.parse(f"d0[tp:packed {sizes}]"), lambda a: 1, lambda a: 2)
        assert part.tolist() == [2, 3, 14, 15, 16, 17, 21]
    with pytest.raises(ValueError, match="cannot be divided"):
        cut(weight[:13], ShardSpec.parse("d0[tp:packed 4,8,2]"), lambda a: 1, lambda a: 2)


def test_two_sequences_in_one_are_each_in_zigzag():
    both = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13])
    part = cut(both, ShardSpec.parse("s[cp:zigzag 1,1]"), lambda a: 0, lambda a: 2)
    assert part.tolist() == [0, 3, 10, 13]


def test_groups_are_held_by_neighbouring_ranks_alike():
    spec = ShardSpec.parse("n[tp:groups 2]")
    heads = torch.arange(2)
    assert [cut(heads, spec, lambda a, rank=rank: rank, lambda a: 4).tolist() for rank in range(4)] == [
        *([0], [0]),
        *([1], [1]),
    ]
    assert spec.global_shape((1,), {"tp": 4}.get) == (2,)
    # With as many ranks as groups it is an ordinary cut.
    assert spec.global_shape((1,), {"tp": 2}.get) == (2,)


def test_flat_range_is_of_the_cut_part():
    whole = torch.arange(16).reshape(4, 4)
    spec = ShardSpec.parse("d0[tp] d1; flat 2:5")
    assert cut(whole, spec, lambda a: 1, lambda a: 2).tolist() == [10, 11, 12]


def test_samples_do_not_multiply_the_shape_and_are_not_cut():
    spec = ShardSpec.parse("s b[dp:samples]")
    assert spec.global_shape((4, 2), {"dp": 8}.get) == (4, 2)
    assert cut(torch.zeros(4, 2), spec, lambda a: 0, lambda a: 8).shape == (4, 2)


def test_unordered_has_no_place_and_no_global_shape():
    spec = ShardSpec.parse("x[ep:unordered] h")
    assert spec.global_shape((3, 2), {"ep": 2}.get) is None
    with pytest.raises(ValueError, match="no fixed place"):
        cut(torch.zeros(4, 2), spec, lambda a: 0, lambda a: 2)


def test_only_drops_axes_that_a_job_does_not_use():
    spec = ShardSpec.parse("s[cp:zigzag,tp] b[dp:samples] h[tp]")
    assert str(spec.only(lambda axis: axis == "tp")) == "s[tp] b h[tp]"
