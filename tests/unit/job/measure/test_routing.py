"""The words of a token: which experts, how far from the edge, how precise the scores."""

import itertools

import pytest
import torch

from msprobe_megatron.job.measure.routing import Ranking, expert_codes, routing_record


def _record(logits, ranking=Ranking(topk=2), chosen=None):
    scores = torch.sigmoid(logits) if ranking.function == "sigmoid" else logits
    if ranking.bias is not None:
        scores = scores + ranking.bias
    chosen = scores.topk(ranking.topk, dim=-1).indices if chosen is None else chosen
    words = routing_record(logits, chosen, ranking, expert_codes(logits.shape[-1], logits.device))
    assert words.dtype is torch.int32
    return words[:, 0], words[:, 1].contiguous().view(torch.float32)


def test_the_code_knows_the_set_and_not_its_order():
    experts = 64
    codes = expert_codes(experts, torch.device("cpu"))
    sets = torch.tensor(list(itertools.combinations(range(experts), 2)))
    logits = torch.zeros(len(sets), experts)
    words = routing_record(logits, sets, Ranking(topk=2), codes)[:, 0]
    assert len(set(words.tolist())) == len(sets)
    assert torch.equal(words, routing_record(logits, sets.flip(-1), Ranking(topk=2), codes)[:, 0])
    as_map = torch.zeros(len(sets), experts, dtype=torch.bool).scatter_(1, sets, True)
    assert torch.equal(words, routing_record(logits, as_map, Ranking(topk=2), codes)[:, 0])


def test_the_margin_is_that_of_the_last_chosen_expert_and_the_next():
    logits = torch.tensor([[3.0, 1.0, 2.0, 1.5]])
    size = logits.square().mean().sqrt()
    assert _record(logits)[1].item() == pytest.approx((0.5 / size).item())
    bias = torch.tensor([0.0, 0.3, 0.0, 0.0])
    scores = torch.sigmoid(logits) + bias
    best = scores.sort(descending=True).values[0]
    ranking = Ranking("sigmoid", bias, topk=2, rounding=0.0)
    assert _record(logits, ranking)[1].item() == pytest.approx(((best[1] - best[2]) / (size / 4)).item(), rel=1e-5)


def test_groups_have_an_edge_of_their_own():
    """Expert 2 is the second best of all, but in a group that lost by 0.1: the margin is that of the groups."""
    logits = torch.tensor([[4.0, 1.1, 3.0, 2.0]])
    ranking = Ranking(topk=2, groups=2, chosen_groups=1)
    margin = _record(logits, ranking, torch.tensor([[0, 1]]))[1].item()
    assert margin == pytest.approx((0.1 / 2 / logits.square().mean().sqrt()).item(), rel=1e-4)


def test_the_lowest_bit_says_that_scores_fit_into_bfloat16():
    logits = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    assert not (_record(logits)[0] & 1).any()
    assert (_record(logits.bfloat16().float())[0] & 1).all()
    assert (_record(logits.bfloat16())[0] & 1).all()
