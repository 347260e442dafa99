from types import SimpleNamespace

import pytest
from torch import nn

from msprobe_megatron.topology import coordinates, names
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.expert_grid import first_expert, placed


class Linear(nn.Module):
    """A column parallel layer of an expert, as far as it says how it is cut."""

    def __init__(self, whole, part):
        super().__init__()
        self.is_expert, self.output_size, self.output_size_per_partition = True, whole, part


class Layer(nn.Module):
    """A MoE layer: so many experts in the job, so many here; `cut` of None is experts that do not tell."""

    def __init__(self, every, local, cut=None, **options):
        super().__init__()
        self.config = SimpleNamespace(num_moe_experts=every, **options)
        self.num_local_experts = local
        self.experts = nn.Module()
        self.experts.config, self.experts.num_local_experts = self.config, local
        self.experts.local_experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(local))
        self.experts.layers = nn.ModuleList([] if cut is None else [Linear(64, 64 // cut)])


def at(rank, *, tp, ep, edp=1):
    """A rank of Megatron's grid, whose getters take the cut of experts to be that of the other layers."""
    own = Coordinates(world=tp * ep * edp, tp_size=tp, dp_size=ep * edp, ep_size=ep, etp_size=tp, edp_size=edp)
    return coordinates.expected(own, rank)


def axes(where):
    return (where.ep, where.ep_size, where.etp, where.etp_size)


@pytest.mark.parametrize("cut", [2, None])
def test_experts_cut_like_other_layers_are_left_where_they_are(cut):
    for rank in range(8):
        where = at(rank, tp=2, ep=2, edp=2)
        assert placed(where, [Layer(8, 4, cut)]) == where


@pytest.mark.parametrize("cut", [4, None])
def test_extended_tp_cuts_every_expert_over_all_ranks(cut):
    # Megatron 0.8: rank of the tensor and expert parallel group, tp fastest; every rank has every expert.
    for rank in range(8):
        found = placed(at(rank, tp=2, ep=2, edp=2), [Layer(8, 8, cut, moe_extended_tp=True)])
        assert axes(found) == (0, 1, rank % 4, 4)
        assert coordinates.expected(found, rank) == found


def test_tp_extend_ep_spreads_whole_experts_over_all_ranks():
    # MindSpeed: first expert = ep_rank * local * tp_size + tp_rank * local.
    for rank in range(8):
        where = at(rank, tp=2, ep=2, edp=2)
        layer = Layer(8, 2, moe_tp_extend_ep=True)
        assert axes(placed(where, [layer])) == (where.ep * 2 + where.tp, 4, 0, 1)
        assert first_expert(layer, where) == where.ep * 2 * 2 + where.tp * 2


def test_whole_experts_on_every_tensor_parallel_rank():
    where = at(1, tp=2, ep=1)
    assert axes(placed(where, [Layer(4, 4, 1)])) == (0, 1, 0, 1)


@pytest.mark.parametrize(("option", "want"), [("moe_extended_tp", (0, 1, 3, 4)), ("moe_tp_extend_ep", (3, 4, 0, 1))])
def test_a_stage_without_experts_goes_by_the_options(option, want):
    dense = nn.Module()
    dense.config = SimpleNamespace(num_moe_experts=8, **{option: True})
    assert axes(placed(at(3, tp=2, ep=2), [dense])) == want


def test_a_dense_model_is_left_where_it_is():
    where = at(1, tp=2, ep=1)
    assert placed(where, [nn.Linear(2, 2)]) == where
    assert placed(where, [Layer(None, 4)]) == where


def test_numbers_of_experts_when_every_rank_has_all(monkeypatch):
    monkeypatch.setattr(coordinates, "current", lambda: at(3, tp=2, ep=2))
    assert {entry.name for entry in names.modules(Layer(2, 2, moe_extended_tp=True))} >= {
        "experts.local_experts.0",
        "experts.local_experts.1",
    }
    assert "experts.local_experts.2" in {entry.name for entry in names.modules(Layer(4, 2))}


class Group(SimpleNamespace):
    """A process group as torch.distributed.get_rank and get_world_size are asked about it."""


def older(**given):
    """`parallel_state` of Megatron before 0.10, rank 3 of tp 2 x ep 2 x 2."""
    return SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_rank=lambda: 1,
        get_tensor_model_parallel_world_size=lambda: 2,
        get_data_parallel_rank=lambda: 1,
        get_data_parallel_world_size=lambda: 4,
        get_data_parallel_group=lambda with_context_parallel: Group(rank=1, size=4),
        get_expert_model_parallel_rank=lambda: 1,
        **{"get_expert_model_parallel_world_size": lambda: 2, **given},
    )


@pytest.mark.parametrize(
    ("given", "edp"),
    [
        ({"get_data_modulo_expert_parallel_group": lambda: Group(rank=0, size=2)}, (0, 2)),
        ({"get_data_modulo_expert_parallel_group": lambda with_context_parallel: Group(rank=1, size=2)}, (1, 2)),
        (
            {
                "get_data_modulo_expert_parallel_group": lambda: Group(rank=0, size=2),
                "get_expert_model_parallel_world_size": lambda: 1,
            },
            (1, 4),
        ),
    ],
)
def test_releases_without_a_getter_cut_experts_as_other_layers(monkeypatch, given, edp):
    from torch import distributed

    monkeypatch.setattr(coordinates, "parallel_state", lambda: older(**given))
    monkeypatch.setattr(distributed, "get_rank", lambda group=None: group.rank)
    monkeypatch.setattr(distributed, "get_world_size", lambda group=None: group.size)
    where = coordinates.current()
    assert (where.etp, where.etp_size) == (1, 2)
    assert (where.edp, where.edp_size) == edp
