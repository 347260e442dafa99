"""Tensors inside of modules: numbered where sizes leave one reading, left alone where they do not."""

from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from msprobe_megatron.topology.names import NamedModule
from msprobe_megatron.topology.shards_of.activations import ChunkLayout
from msprobe_megatron.topology.shards_of.inner_activations import inner_numbering

RANK, SIZE = {"tp": 1}, {"tp": 2}


def module_of(kind, **attributes):
    module = type(kind, (nn.Module,), {})()
    for name, value in attributes.items():
        object.__setattr__(module, name, value)
    return module


def numbers(module, shape, *, name="decoder.layers.0.part", layout=None, factor=""):
    """Numbers of the local elements in the whole tensor, as an array of their shape."""
    entry = NamedModule(name, module, None)
    axes = (lambda axis: RANK.get(axis, 0)), (lambda axis: SIZE.get(axis, 1))
    found = inner_numbering(entry, shape, layout or ChunkLayout(), *axes, factor=factor)
    if found is None:
        return None
    total = np.zeros(shape, dtype=np.int64)
    for dim, (step, segments) in enumerate(found):
        line = np.concatenate([offset + step * np.arange(count) for _, count, offset in segments])
        total += line.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return total


ATTENTION = {"num_attention_heads_per_partition": 2, "num_query_groups_per_partition": 1}


def test_scores_of_samples_and_heads_in_one_dimension():
    got = numbers(module_of("DotProductAttention", **ATTENTION), (6, 4, 5))
    whole = np.arange(3 * 4 * 4 * 5).reshape(3, 4, 4, 5)
    assert (got == whole[:, 2:].reshape(6, 4, 5)).all()
    assert numbers(module_of("DotProductAttention", **ATTENTION), (5, 4, 5)) is None


@pytest.mark.parametrize(("heads", "known"), [(2, True), (1, True), (3, False)])
def test_queries_and_keys(heads, known):
    config = SimpleNamespace(num_query_groups=2)
    got = numbers(module_of("Attention", config=config, **ATTENTION), (4, 3, heads, 8))
    if known:
        assert (got == np.arange(4 * 3 * 2 * heads * 8).reshape(4, 3, 2 * heads, 8)[:, :, heads:]).all()
    else:
        assert got is None


def test_two_readings_are_none():
    """The table of rotations looks like one head of one sample; ranks may share a group of keys."""
    few = SimpleNamespace(num_query_groups=1)
    assert numbers(module_of("Attention", config=few, **ATTENTION), (4, 3, 1, 8)) is None
    enough = SimpleNamespace(num_query_groups=2)
    assert numbers(module_of("Attention", config=enough, **ATTENTION), (4, 1, 1, 8)) is None


MLP = {
    "linear_fc1": SimpleNamespace(output_size_per_partition=12),
    "linear_fc2": SimpleNamespace(input_size_per_partition=6),
}


def test_both_sides_of_an_activation_function():
    given = numbers(module_of("MLP", **MLP), (2, 3, 12))
    whole = np.arange(2 * 3 * 24).reshape(2, 3, 24)
    assert (given == np.concatenate([whole[..., 6:12], whole[..., 18:24]], -1)).all()
    result = numbers(module_of("MLP", **MLP), (2, 3, 6))
    assert (result == np.arange(2 * 3 * 12).reshape(2, 3, 12)[..., 6:]).all()
    assert numbers(module_of("MLP", **MLP), (2, 3, 7)) is None


def test_tokens_of_experts_and_other_modules_are_not_known():
    assert numbers(module_of("MLP", **MLP), (2, 3, 6), name="decoder.layers.0.mlp.experts.local_experts.0") is None
    assert numbers(module_of("Other", **MLP), (2, 3, 6)) is None


def test_a_linear_layer_whose_sides_are_of_one_size():
    """Its input is what is multiplied, its output what a bias is added to."""
    linear = module_of("ColumnParallelLinear", input_size=8, output_size_per_partition=8, output_size=16)
    assert (numbers(linear, (2, 3, 8)) == np.arange(2 * 3 * 16).reshape(2, 3, 16)[..., 8:]).all()
    assert numbers(linear, (2, 3, 8), factor="forward") is None  # as the input of the module
    gathered = numbers(linear, (2, 3, 8), factor="forward", layout=ChunkLayout(sequence_parallel=True))
    assert (gathered == np.arange(2 * 3 * 8).reshape(2, 3, 8)).all()
    turned = numbers(linear, (8, 6), factor="backward")
    assert (turned == np.arange(16 * 6).reshape(16, 6)[8:]).all()
