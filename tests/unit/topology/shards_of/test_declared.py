"""Shards that Megatron declares: what a class cannot say is asked of its children, and the class is named."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from msprobe_megatron.topology import coordinates
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.shards_of import declared


class Child(nn.Module):
    """A column-parallel weight of 8 rows, of which this rank of two holds the second half."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))

    def sharded_state_dict(self):
        tensor = SimpleNamespace(
            key="weight", data=self.weight, local_shape=(4, 3), global_shape=(8, 3), global_offset=(4, 0)
        )
        return {"weight": tensor}


class Whole(nn.Module):
    """A model that declares its child's shards, or fails to."""

    def __init__(self, error):
        super().__init__()
        self.child = Child()
        self.error = error

    def sharded_state_dict(self):
        if self.error:
            raise self.error
        return {"child.weight": self.child.sharded_state_dict()["weight"]}


@pytest.fixture(autouse=True)
def second_of_two(monkeypatch):
    monkeypatch.setattr(coordinates, "parallel_state", lambda: SimpleNamespace())
    monkeypatch.setattr(coordinates, "current", lambda: Coordinates(rank=1, world=2, tp=1, tp_size=2))
    monkeypatch.setattr(declared, "_UNANSWERED", {})


@pytest.mark.parametrize("error", [None, KeyError("no such layer")], ids=["whole", "by its children"])
def test_a_model_that_cannot_say_is_asked_part_by_part_and_named(error):
    model = Whole(error)
    assert str(declared.declared_spec(model.child.weight, model)) == "d0[tp] d1"
    assert declared.unanswered() == ({"Whole": "KeyError: 'no such layer'"} if error else {})
