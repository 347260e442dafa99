"""Tensors inside what a call returns: by the quick way and by the general one, under the same paths."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from msprobe_megatron.job.sites.calls.arguments import find_tensors, results

X, Y = torch.ones(2), torch.zeros(3)
Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    value: torch.Tensor
    rest: tuple


class Own(torch.Tensor):
    """A subclass."""


@pytest.mark.parametrize(
    ("output", "paths"),
    [
        (X, [""]),
        ((X, None), ["0"]),
        ((None, X, "text", 3, [Y, {"a": X}]), ["1", "4.0", "4.1.a"]),
        ([X, (Y,)], ["0", "1.0"]),
        ({"a": X, "b": (None, Y)}, ["a", "b.1"]),
        (Pair(X, Y), ["0", "1"]),
        (Output(X, (Y,)), ["value", "rest.0"]),
        ((nn.Parameter(X), X.as_subclass(Own)), ["1"]),
        (((((X,),),),), ["0.0.0.0"]),
        ((((((X,),),),),), []),
        (None, []),
        ((), []),
    ],
    ids=str,
)
def test_results(output, paths):
    found, general = results(output), []
    find_tensors(output, "", general)
    assert [path for path, _ in found] == paths
    assert [(path, id(x)) for path, x in found] == [(path, id(x)) for path, x in general]
