"""Hooks that are set again and again: each time as if registered anew, and gone in between."""

import pytest
import torch
from torch import nn

from msprobe_megatron.job.sites.module.hooks import ModuleHooks


class Net(nn.Module):
    def forward(self, x, *, wrong=False):
        if wrong:
            raise ValueError("of the model")
        return x + 1


def dicts(module):
    names = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")
    return [dict(getattr(module, name)) for name in (*names, "_forward_hooks_always_called")]


@pytest.mark.parametrize("always", [True, False])
def test_set_and_removed_again_and_again(always):
    module, seen = Net(), []
    hooks = ModuleHooks(
        module,
        lambda module, args, kwargs: seen.append(("before", dict(kwargs))),
        lambda module, args, kwargs, output: seen.append(("after", dict(kwargs))),
        always=always,
    )
    empty = dicts(module)
    for _ in range(3):
        hooks.set()
        kept = dicts(module)
        assert torch.equal(module(torch.zeros(1), wrong=False), torch.ones(1))
        with pytest.raises(ValueError, match="of the model"):
            module(torch.zeros(1), wrong=True)
        after = [("after", {"wrong": True})] if always else []
        assert seen == [("before", {"wrong": False}), ("after", {"wrong": False}), ("before", {"wrong": True}), *after]
        seen.clear()
        hooks.remove()
        hooks.remove()
        assert dicts(module) == empty != kept
        module(torch.zeros(1))
        assert seen == []


def test_hooks_of_others_stay(always=True):
    module, order = Net(), []
    hooks = ModuleHooks(module, lambda *a: order.append("ours"), lambda *a: None, always=always)
    hooks.set()
    hooks.remove()
    handle = module.register_forward_pre_hook(lambda *a: order.append("theirs"))
    hooks.set()
    module(torch.zeros(1))
    hooks.remove()
    module(torch.zeros(1))
    assert order == ["theirs", "ours", "theirs"]
    handle.remove()
