"""Numbers of states that are kept in another form, decoded: against NumPy, bit by bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from msprobe_megatron.topology.shards_of.optimizer_values import (
    MASTER,
    has_master,
    is_encoded,
    state_value,
    weight_value,
)
from msprobe_megatron.topology.shards_of.optimizers import Owned


class Scaled:
    """An optimizer that keeps halves of what its states stand for."""

    def __init__(self):
        self.state = {}
        self.asked = []

    def get_unscaled_state(self, main, name):
        self.asked.append(name)
        return self.state[main][name].float() * 2


class Wrapped(torch.Tensor):
    """A tensor of 8 bits that calls itself one of float32."""


def owned(optimizer, **states):
    main = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.bfloat16))
    optimizer.state[main] = states
    return Owned(main, main, optimizer, None)


def test_a_weight_and_the_16_bits_below_it_are_a_float32():
    generator = np.random.default_rng(3)
    bits = generator.integers(-(2**31), 2**31, 20_000, dtype=np.int64).astype(np.int32)
    exact = bits.view(np.float32)
    exact = exact[np.isfinite(exact) & (np.abs(exact) < 3e38)]
    weight = torch.from_numpy(exact.copy()).bfloat16()
    high = weight.float().numpy().view(np.int32)
    low = (exact.view(np.int32).astype(np.int64) - high).astype(np.int64)
    assert low.min() < -30_000 and low.max() > 30_000, "rounded up and down"
    # Halfway between two, the difference is one more than 16 bits hold.
    fits = np.abs(low + 0.5) < 2**15
    assert fits.mean() > 0.999
    main = torch.nn.Parameter(weight)
    optimizer = Scaled()
    optimizer.state[main] = {MASTER: torch.from_numpy(low.astype(np.int16))}
    entry = Owned(main, main, optimizer, None)
    for found in (state_value(entry, MASTER), weight_value(entry)):
        assert np.array_equal(found.numpy().view(np.int32)[fits], exact.view(np.int32)[fits])
    assert has_master(entry) and optimizer.asked == []


@pytest.mark.parametrize(
    ("stored", "encoded"),
    [
        (torch.ones(3), False),
        (torch.ones(3, dtype=torch.bfloat16), False),
        (torch.ones(3, dtype=torch.float64), False),
        (torch.ones(3, dtype=torch.float16), True),
        (torch.ones(3, dtype=torch.uint8), True),
        (torch.ones(3).as_subclass(Wrapped), True),
    ],
)
def test_what_has_a_factor_is_asked_of_the_optimizer(stored, encoded):
    optimizer = Scaled()
    entry = owned(optimizer, exp_avg=stored)
    assert is_encoded(entry, "exp_avg") == encoded
    assert state_value(entry, "exp_avg").tolist() == [2.0 if encoded else 1.0] * 3
    assert optimizer.asked == (["exp_avg"] if encoded else [])
    assert not is_encoded(entry, "absent")


def test_an_optimizer_without_factors_keeps_what_it_says():
    plain = SimpleNamespace(state={})
    entry = owned(plain, exp_avg=torch.ones(3, dtype=torch.float16))
    assert not is_encoded(entry, "exp_avg") and state_value(entry, "exp_avg").dtype is torch.float16


def test_a_master_weight_in_16_bits_is_what_a_step_changes():
    entry = owned(Scaled(), **{MASTER: torch.full((3,), 4.0, dtype=torch.float16)})
    assert weight_value(entry).tolist() == [8.0] * 3 and has_master(entry)
    bare = owned(Scaled())
    assert weight_value(bare).tolist() == [1.0, -2.0, 3.0] and not has_master(bare)
    assert has_master(Owned(bare.parameter, torch.zeros(3), bare.optimizer, None)), "a copy of its own"
