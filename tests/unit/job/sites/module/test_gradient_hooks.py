"""One hook a tensor tells as many rows as ask for it, in their order, what a registered hook would have been told."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from msprobe_megatron.job.clock import Moment
from msprobe_megatron.job.sites.module.hooks import GradientHook, await_gradient
from tests.unit.job.sites.functions import Double

NOW = Moment(0, 0)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x * 3, lambda x: x.view(2, 2), Double.apply])
def test_every_place_is_told_in_order_and_once(make):
    x = torch.arange(4.0, requires_grad=True)
    seen, theirs = [], []
    y = make(x)
    see = seen_by(seen)
    for place in "abc":
        await_gradient(y, see, place, NOW)
    assert sum(isinstance(hook, GradientHook) for hook in y._backward_hooks.values()) == 1
    y.register_hook(theirs.append)
    (y * y).sum().backward()
    assert [place for place, _ in seen] == list("abc")
    assert all(torch.equal(gradient, 2 * y.detach()) for _, gradient in seen) and len(theirs) == 1


def seen_by(seen):
    return lambda place, gradient, moment: seen.append((place, gradient.clone()))


def test_a_hook_of_somebody_else_stays_in_its_place():
    x = torch.ones(3, requires_grad=True) * 1
    seen = []
    see = seen_by(seen)
    await_gradient(x, see, "before", NOW)
    x.register_hook(lambda gradient: gradient * 10)
    await_gradient(x, see, "behind", NOW)
    await_gradient(x, see, "behind too", NOW)
    x.sum().backward()
    assert [(place, gradient[0].item()) for place, gradient in seen] == [
        ("before", 1.0),
        ("behind", 10.0),
        ("behind too", 10.0),
    ]


def test_another_step_shares_nothing_and_what_is_written_in_place_is_another_tensor():
    x = torch.ones(3, requires_grad=True) * 1
    first, second = [], []
    await_gradient(x, seen_by(first), "first", NOW)
    await_gradient(x, see := seen_by(second), "second", NOW)
    x.mul_(5)
    await_gradient(x, see, "after", NOW)
    x.sum().backward()
    assert [(place, g[0].item()) for place, g in first + second] == [("first", 5.0), ("after", 1.0), ("second", 5.0)]


def test_gradients_are_those_of_a_model_without_hooks():
    def run(watch):
        torch.manual_seed(0)
        x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 5, requires_grad=True)
        y = torch.tanh(x @ w)
        if watch:
            await_gradient(x, seen_by([]), "x", NOW)
            await_gradient(y, seen_by([]), "y", NOW)
        (y * y).sum().backward()
        return x.grad, w.grad

    assert all(torch.equal(left, right) for left, right in zip(run(True), run(False), strict=True))


def test_where_torch_keeps_hooks_elsewhere_it_is_registered_as_usual():
    class Elsewhere(torch.Tensor):
        _backward_hooks = property(lambda self: None)

    x = (torch.ones(2, requires_grad=True) * 1).as_subclass(Elsewhere)
    registered = []
    x.register_hook = registered.append
    await_gradient(x, seen_by([]), "x", NOW)
    assert len(registered) == 1


def test_what_a_hook_computes_is_no_call_of_the_training_code():
    calls = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    await_gradient(y, lambda place, gradient, moment: gradient.mul(2).sum(), "y", NOW)
    total, one = y.sum(), torch.ones(())
    with Calls():
        # As Megatron does it: a function of torch would be seen, and hide all that is called within.
        torch.autograd.Variable._execution_engine.run_backward(
            (total,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    assert calls == [] and x.grad.tolist() == [2.0] * 3
