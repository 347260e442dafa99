"""Which module is running, and where the mode that sees calls is on."""

import threading

import pytest
import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode

from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.sites.calls import mode_stack
from msprobe_megatron.job.sites.calls.naming import ModuleFrames
from msprobe_megatron.job.sites.calls.rerunnable import CallSite


class Child(nn.Module):
    def forward(self, x, watch):
        watch("child")
        if x is None:
            raise ValueError("injected")
        return x * 2


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = Child()

    def forward(self, x, watch):
        watch("before")
        y = self.child(x, watch)
        watch("after")
        return y


def failing(error, where):
    raise AssertionError(where) from error


@pytest.fixture
def clock():
    clock = Clock()
    clock.start_step(0)
    return clock


def test_stack_and_mode_follow_the_chosen_modules_and_outlive_an_exception(clock):
    """The child is not of interest: the mode is off in it, on again after it, and off outside of the model."""
    model, mode = Parent(), BaseTorchFunctionMode()
    frames = ModuleFrames([model], clock, failing, lambda running, args: running if running.name == "model" else None)
    frames.mode = mode
    seen = {}

    def watch(where):
        names = [None if frame is None else frame.name for frame in frames.stack]
        seen[where] = (names, mode_stack.holds(mode))

    frames.install()
    try:
        for x in (torch.ones(1), None, torch.ones(1)):
            seen.clear()
            if x is None:
                with pytest.raises(ValueError, match="injected"):
                    model(x, watch)
            else:
                model(x, watch)
                assert seen["after"] == (["model"], True)
            assert seen["before"] == (["model"], True)
            assert seen["child"] == (["model", None], False)
            assert frames.stack == [] and not mode_stack.holds(mode)
    finally:
        frames.remove()
    model(torch.ones(1), watch)
    assert seen["child"] == ([], False)


def test_forgetting_an_unfinished_module_restores_the_mode(clock):
    mode = BaseTorchFunctionMode()
    frames = ModuleFrames([Parent()], clock, failing, lambda running, args: None)
    frames.mode = mode
    frames.install()
    mode_stack.push(mode)
    try:
        frames.push(None)
        assert not mode_stack.holds(mode)
        frames.forget()
        assert frames.stack == [] and mode_stack.holds(mode)
    finally:
        mode_stack.take_out(mode)
        frames.remove()


def test_a_thread_that_was_inside_a_module_starts_the_next_step_with_an_empty_stack(clock):
    frames = ModuleFrames([Parent()], clock, failing)
    frames.install()
    entered, next_step, heights = threading.Event(), threading.Event(), []

    def work():
        frames.push("unfinished")
        heights.append(len(frames.stack))
        entered.set()
        next_step.wait(30)
        heights.append(len(frames.stack))

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(30)
    frames.install()
    next_step.set()
    thread.join(30)
    frames.remove()
    assert heights == [1, 0]


def test_calls_outside_of_modules_are_handed_over_after_a_module_that_raised(clock):
    class Handler:
        def __init__(self):
            self.calls = []

        def wants(self, module, phase, moment):
            return module == "outside"

        def call(self, api, number, where, function, args, kwargs):
            self.calls.append(f"{where.module}/{api}.{number}")
            return function(*args, **kwargs)

    model, handler, x = Parent(), Handler(), torch.ones(2)
    site = CallSite([model], clock, failing, handler)
    site.install()
    try:
        with pytest.raises(ValueError, match="injected"):
            model(None, lambda where: None)
        site.restart()
        torch.sum(model(x, lambda where: None))
        site.pause()
        torch.exp(x)
        site.resume()
        torch.sin(x)
    finally:
        site.remove()
    torch.cos(x)
    assert handler.calls == ["outside/torch.sum.0", "outside/torch.sin.0"]
