"""Wrappers of several sites around one function, put on and taken off in any order."""

import itertools

import pytest
import torch

from msprobe_megatron.sites.wrappers import put_on, take_off


class Host:
    @classmethod
    def apply(cls, x):
        return [cls.__name__, x]


def marking(mark):
    return lambda function: lambda cls, x: [mark, *function(cls, x)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_leaves_the_original_and_no_chain(order):
    original = Host.__dict__["apply"]
    wraps = [marking(mark) for mark in "abc"]
    for _ in range(3):
        for wrap in wraps:
            put_on(Host, "apply", wrap)
        assert Host.apply(1) == ["c", "b", "a", "Host", 1]
        left = [0, 1, 2]
        for index in order:
            take_off(Host, "apply", wraps[index])
            left.remove(index)
            assert Host.apply(1) == [*("abc"[i] for i in reversed(left)), "Host", 1]
        take_off(Host, "apply", wraps[0])
        assert Host.__dict__["apply"] is original


def test_plain_functions_of_modules():
    original = torch.relu
    wrap = marking("x")
    put_on(torch, "relu", wrap)
    assert torch.relu is not original
    take_off(torch, "relu", wrap)
    assert torch.relu is original
