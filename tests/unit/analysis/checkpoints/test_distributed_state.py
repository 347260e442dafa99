"""Buffers of a distributed optimizer, made by hand: which weights are looked for in which of them."""

import torch

from msprobe_megatron.analysis.checkpoints.distributed_state import places_of, states_in_buffers

PRECISIONS = (torch.float32, torch.float32)


def laid(*weights):
    """One after the other, the last first, each on a multiple of 64."""
    flat = torch.zeros(0)
    for weight in reversed(weights):
        flat = torch.cat([flat, torch.zeros(-flat.numel() % 64), weight.reshape(-1)])
    return {"param": flat, "exp_avg": flat * 10}


def random(*sizes):
    return [torch.randn(size) for size in sizes]


def found(content, *chunks):
    states, odd = states_in_buffers(content, chunks)
    assert not odd, odd
    for kind, chunk, name, value in states:
        assert torch.equal(value, chunks[chunk][name].float() * (10 if kind == "exp_avg" else 1)), (kind, chunk, name)
    return sorted((chunk, name) for kind, chunk, name, _ in states if kind == "exp_avg")


def test_experts_have_a_buffer_of_their_own_or_share_one():
    torch.manual_seed(4)
    names = ("a.weight", "mlp.experts.fc1", "b.weight", "mlp.experts.fc2")
    chunk = dict(zip(names, random(70, 90, (3, 5), 20), strict=True))
    chunk["router.expert_bias"] = torch.randn(4)  # moved without a gradient: in no buffer
    apart = [
        {0: {PRECISIONS: laid(chunk["a.weight"], chunk["b.weight"])}},
        {0: {PRECISIONS: laid(chunk["mlp.experts.fc1"], chunk["mlp.experts.fc2"])}},
    ]
    together = {0: {PRECISIONS: laid(*(chunk[name] for name in names))}}
    expected = sorted((0, name) for name in names)
    assert found(apart, chunk) == found([None, *apart], chunk) == found(together, chunk) == expected


def test_chunks_that_hold_the_same_numbers_are_told_apart():
    first, second = {"w": torch.zeros(8)}, {"w": torch.zeros(8)}
    content = {0: {PRECISIONS: laid(first["w"])}, 1: {PRECISIONS: laid(second["w"])}}
    assert found(content, first, second) == [(0, "w"), (1, "w")]


def test_weights_of_another_dtype_are_not_of_this_buffer():
    torch.manual_seed(5)
    chunk = {"half": torch.randn(9).bfloat16().float(), "whole": torch.randn(9)}
    halves = {**chunk, "half": chunk["half"].bfloat16()}
    content = {
        0: {(torch.bfloat16, torch.float32): laid(chunk["half"]), PRECISIONS: laid(chunk["whole"])},
    }
    assert found(content, halves) == [(0, "half"), (0, "whole")]


def test_a_weight_that_only_begins_alike_is_not_believed():
    torch.manual_seed(6)
    (weight,) = random(2000)
    moved = weight.clone()
    moved[-1] += 1
    states, odd = states_in_buffers({0: {PRECISIONS: laid(moved)}}, [{"w": weight}])
    assert states == [] and [buffer.name for buffer in odd] == [f"0.{PRECISIONS}"]


def test_a_buffer_that_holds_more_than_the_weights_is_not_believed():
    torch.manual_seed(7)
    weights = random(70, 5)
    buffer = {kind: torch.cat([flat, torch.ones(3)]) for kind, flat in laid(*weights).items()}
    states, odd = states_in_buffers({0: {PRECISIONS: buffer}}, [dict(zip("ab", weights, strict=True))])
    assert states == [] and len(odd) == 1


def test_a_place_that_leads_nowhere_is_given_up():
    """The second weight fits at a multiple of 64 too, but then the third does not."""
    weights = [torch.zeros(3), torch.zeros(4), torch.cat([torch.zeros(69), torch.tensor([5.0])])]
    assert places_of(weights, torch.cat(weights)) == [0, 3, 7]
