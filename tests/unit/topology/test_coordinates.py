import itertools

import pytest

from msprobe_megatron.topology.coordinates import Coordinates, all_ranks, expected


@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), [(2, 1, 1, 2), (2, 2, 2, 2), (1, 1, 4, 1), (4, 1, 2, 3)])
def test_placement_is_megatrons_rank_order(tp, cp, dp, pp):
    # Megatron's RankGenerator with order tp-cp-ep-dp-pp: tp varies fastest, pp slowest.
    own = Coordinates(rank=0, world=tp * cp * dp * pp, tp_size=tp, cp_size=cp, dp_size=dp, pp_size=pp)
    grid = list(itertools.product(range(pp), range(dp), range(cp), range(tp)))
    for rank, (p, d, c, t) in enumerate(grid):
        got = expected(own, rank)
        assert (got.tp, got.cp, got.dp, got.pp) == (t, c, d, p)


def test_a_rank_that_stands_elsewhere_is_not_guessed_at():
    own = Coordinates(rank=1, world=4, tp=0, tp_size=2, pp=1, pp_size=2)
    assert all_ranks(own) is None


def test_table_of_all_ranks_contains_the_own_one():
    own = Coordinates(rank=3, world=4, tp=1, tp_size=2, pp=1, pp_size=2, edp_size=2, edp=1)
    table = all_ranks(own)
    assert table is not None
    assert len(table) == 4
    assert table[3] == own
