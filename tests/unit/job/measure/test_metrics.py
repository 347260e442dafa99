"""Metrics of attention, routers and weights against plain NumPy."""

import numpy as np
import pytest
import torch

from msprobe_megatron.job.measure.metrics import (
    SpectralNorms,
    attention_sample,
    expert_load,
    hashed_vector,
    router_entropy,
    spread,
    stable_rank,
)


def test_spread():
    assert spread(3, 5) == [0, 1, 2] and spread(9, 3) == [0, 4, 8] and spread(7, 1) == [6]
    assert len(set(spread(1000, 16))) == 16


@pytest.mark.parametrize("kind", ["none", "causal", "mask"])
def test_attention_of_shared_keys(kind):
    torch.manual_seed(1)
    query, key = torch.randn(12, 2, 6, 8, dtype=torch.bfloat16), torch.randn(12, 2, 3, 8, dtype=torch.bfloat16)
    mask = torch.rand(1, 1, 12, 12) < 0.3
    mask[..., 0] = False  # no row is without anything to look at
    given = {"none": {}, "causal": {"causal": True}, "mask": {"mask": mask}}[kind]
    found = attention_sample(query, key, 0.25, heads=3, rows=5, **given)
    q, k = query.double().numpy(), key.double().numpy()
    for h, head in enumerate(spread(6, 3)):
        for r, row in enumerate(spread(12, 5)):
            logits = k[:, 0, head // 2] @ q[row, 0, head] * 0.25
            allowed = {"none": np.full(12, True), "causal": np.arange(12) <= row, "mask": ~mask[0, 0, row].numpy()}[
                kind
            ]
            logits = logits[allowed]
            shares = np.exp(logits) / np.exp(logits).sum()
            assert found.entropy[h, r].item() == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-5)
            assert found.largest[h, r].item() == pytest.approx(logits.max(), rel=1e-5)


def test_load_from_a_map_and_from_numbers():
    routing = torch.tensor([[True, False, True], [True, False, False]])
    assert expert_load(routing, 3).tolist() == [2.0, 0.0, 1.0]
    assert expert_load(torch.tensor([[0, 2], [0, 0]]), 3).tolist() == [3.0, 0.0, 1.0]


def test_entropy_of_a_router_that_does_not_care():
    assert router_entropy(torch.randn(7, 2, 4), torch.zeros(5, 4)).tolist() == pytest.approx([np.log(5)] * 14, rel=1e-6)


def test_spectral_norm_is_close_at_every_look_and_follows_the_weight():
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(20, 12), full_matrices=False)
    weight = u @ torch.diag(torch.linspace(3, 1, 12)) @ v
    norms = SpectralNorms()
    errors = [abs(norms("w", weight).item() - 3) for _ in range(30)]
    assert errors[0] < 0.05 and errors[-1] < 1e-2
    assert abs(norms("w", 2 * weight).item() - 6) < 2e-2
    assert stable_rank(torch.eye(5), norms("other", torch.eye(5))).item() == pytest.approx(5, rel=1e-5)


def test_no_random_number_is_drawn():
    before = torch.get_rng_state()
    first = hashed_vector(1000, torch.device("cpu"))
    SpectralNorms()("w", torch.ones(3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, hashed_vector(1000, torch.device("cpu")))
    assert abs(first.mean().item()) < 0.05 and first.std().item() == pytest.approx(12**-0.5, rel=0.1)
