"""Which ranks hold the same part of a tensor."""

from msprobe_megatron.analysis.compare.merge import merge_plan

_RANKS = {rank: {"tp": rank} for rank in range(4)}


def test_ranks_that_share_a_group_of_heads_are_replicas():
    plan = merge_plan("s b n[tp:groups 2] d", {"tp": 4})
    assert plan.parts == 2
    assert plan.replica_groups(_RANKS) == [[0, 1], [2, 3]]


def test_groups_that_are_not_fewer_than_ranks_are_an_ordinary_cut():
    plan = merge_plan("s b n[tp:groups 4] d", {"tp": 4})
    assert plan.parts == 4
    assert plan.replica_groups(_RANKS) == [[0], [1], [2], [3]]


def test_packed_tensors_have_a_part_on_every_rank():
    plan = merge_plan("d0[tp:packed 8,8,2] d1", {"tp": 4})
    assert (plan.parts, plan.reason) == (4, "")
