import torch
from torch import nn

from msprobe_megatron.topology import names
from msprobe_megatron.topology.layers import layer_of


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layer_number = number
        self.mlp = nn.Linear(2, 2)


class Experts(nn.Module):
    def __init__(self, local):
        super().__init__()
        self.num_local_experts = local
        self.local_experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(local))


class Chunk(nn.Module):
    def __init__(self, numbers, tied=False):
        super().__init__()
        self.share_embeddings_and_output_weights = tied
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer(n) for n in numbers)
        self.output_layer = nn.Linear(2, 2, bias=False)


class Float16Module(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def test_layer_numbers_are_global_and_wrappers_are_gone():
    chunk = Float16Module(Chunk([5, 6]))
    found = [entry.name for entry in names.modules(chunk)]
    assert found[0] == names.ROOT
    assert "decoder.layers.4.mlp" in found
    assert "decoder.layers.5.mlp" in found
    assert not any("module." in name for name in found)


def test_a_child_called_module_is_not_taken_for_a_wrapper():
    plain = nn.Module()
    plain.module = nn.Linear(2, 2)
    assert [p.name for p in names.parameters(plain)] == ["module.weight", "module.bias"]


def test_tied_copy_carries_the_embeddings_name():
    entries = list(names.parameters(Chunk([1], tied=True)))
    tied = [e for e in entries if e.name == "embedding.word_embeddings.weight"]
    assert len(tied) == 1
    assert [e.name for e in names.parameters(Chunk([1]))][-1] == "output_layer.weight"


def test_a_shared_parameter_is_listed_once():
    model = nn.Module()
    model.a = nn.Linear(2, 2, bias=False)
    model.b = nn.Linear(2, 2, bias=False)
    model.b.weight = model.a.weight
    assert [p.name for p in names.parameters(model)] == ["a.weight"]


def test_experts_without_a_group_stand_by_rank_zero():
    model = nn.Module()
    model.experts = Experts(2)
    assert "experts.local_experts.1" in [entry.name for entry in names.modules(model)]


def test_layer_of():
    assert layer_of("decoder.layers.12.mlp.linear_fc1") == 12
    assert layer_of("embedding.word_embeddings") is None
    assert layer_of("layers") is None


def test_parents_and_attributes():
    entry = {e.name: e for e in names.modules(Chunk([1]))}["decoder.layers.0.mlp"]
    assert entry.attribute == "mlp"
    assert isinstance(entry.parent, Layer)
    assert isinstance(entry.module, torch.nn.Linear)
