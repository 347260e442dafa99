import pytest
import torch

from msprobe_megatron.job.sites.module.routing import own_choice
from msprobe_megatron.topology.coordinates import Coordinates

LOGITS = torch.zeros(3, 4)  # 3 tokens, 4 experts
CHOICES = torch.arange(12).reshape(6, 2)


def test_the_choices_of_the_own_tokens_are_taken_as_they_are():
    assert own_choice(CHOICES[:3], LOGITS, Coordinates()).equal(CHOICES[:3])
    batched = own_choice(torch.ones(3, 2, 4, dtype=torch.bool), torch.zeros(3, 2, 4), Coordinates())
    assert batched.shape == (6, 4)


@pytest.mark.parametrize("tp", [0, 1])
def test_of_gathered_choices_those_of_the_own_tokens(tp):
    # core 0.6, alltoall dispatcher: gather_from_sequence_parallel_region(logits) inside of `routing`.
    where = Coordinates(world=2, tp=tp, tp_size=2, etp=tp, etp_size=2)
    assert own_choice(CHOICES, LOGITS, where).equal(CHOICES[3 * tp : 3 * tp + 3])


def test_gathered_over_experts_too():
    where = Coordinates(world=2, dp_size=2, dp=1, ep=1, ep_size=2)
    assert own_choice(CHOICES, LOGITS, where).equal(CHOICES[3:])


def test_what_cannot_be_told_is_not_recorded():
    handle = object()
    assert own_choice((CHOICES, handle), LOGITS, Coordinates()) is None  # a gather under way
    assert own_choice(CHOICES[:5], LOGITS, Coordinates(tp_size=2)) is None
