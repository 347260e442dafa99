"""The compiled hooks tell the sink the very same as those in Python, in the same order, and leave as little behind."""

import contextlib
import copy
import gc
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from msprobe_megatron.job.clock import Clock, Moment
from msprobe_megatron.job.measure import native
from msprobe_megatron.job.sites.compiled import loader
from msprobe_megatron.job.sites.compiled.bindings import may_hold_tensors
from msprobe_megatron.job.sites.module.modules import ModuleSite
from msprobe_megatron.topology.coordinates import Coordinates


@dataclass
class Both:
    first: torch.Tensor
    second: torch.Tensor


class Pair(nn.Module):
    """Takes tensors in every form, some of them to be looked into, and gives two of them and a None."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, mask=None, *more, scale=1.0, nested=None, **rest):
        y = self.inner(x) * scale
        for other in (*more, *rest.values()):
            y = y + other
        if nested is not None:
            y = y + nested["a"][0]
        return y, None, y.detach() if mask is None else mask


class Net(nn.Module):
    """Calls its parts as models do: by position and keyword, twice, repeated in backward."""

    def __init__(self, repeat=False):
        super().__init__()
        self.pair, self.twice, self.last, self.repeat = Pair(), nn.Linear(4, 4), nn.LayerNorm(4), repeat

    def forward(self, x, how=0):
        y, _, _ = self.pair(x, scale=2.0)
        if how == 1:
            y = self.pair(y, x > 0, x, bias=x)[0]
        if how == 2:
            y = self.pair(y, nested={"a": [x]})[0]
        y = self.twice(self.twice(y))
        y = checkpoint(self.last, y, use_reentrant=False) if self.repeat else self.last(y)
        if how == 3:
            y = y.mul(1)
            y.mul_(2)
        if how == 4:
            y.register_hook(lambda gradient: gradient * 3)
        return y


class Holder(nn.Module):
    def forward(self, x):
        return Both(x * 1, x * 2)


class Leaves(nn.Module):
    """Leaves its bias to the caller, as Megatron's layers do."""

    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(4, 4, bias=False), nn.Parameter(torch.arange(4.0))

    def forward(self, x):
        return self.linear(x), self.bias


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaves = Leaves()

    def forward(self, x):
        y, bias = self.leaves(x)
        return y + bias


class Sink:
    """Notes what it is told of; may have something against a place."""

    def __init__(self, against="", sides=()):
        self.seen, self.against, self.sides = [], against, sides

    def wants(self, name):
        return True

    def wants_io(self, direction, io):
        return (direction, io) not in self.sides

    def see(self, place, tensor, microbatch, phase):
        if self.against and self.against in f"{place.kind} {place.name}":
            raise KeyError(place.name)
        figures = (tuple(tensor.shape), tensor.dtype, tensor.detach().double().sum().item())
        self.seen.append((place.kind, place.name, place.io, place.path, microbatch, phase, *figures))


def watched(model, sink, clock, compiled, fault=None, stacks=True):
    native.load()
    if loader.load() is None:
        pytest.skip(f"no compiled hooks: {loader.why_not()}")
    faults = []
    site = ModuleSite([model], sink, clock, Coordinates(), fault or (lambda e, what: faults.append((e, what))), stacks)
    assert site._watch is not None
    if not compiled:
        site._watch = None
    return site, faults


def told(compiled, how, repeat=False, sides=(), build=Net):
    torch.manual_seed(3)
    model, sink, clock = build(repeat) if build is Net else build(), Sink(sides=sides), Clock()
    site, faults = watched(model, sink, clock, compiled)
    grads = []
    for step in range(3):
        clock.start_step(step)
        site.install()
        for microbatch in range(2):
            clock.moment = Moment(microbatch, 0)
            x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
            y = model(x, how) if build is Net else model(x)
            (y if isinstance(y, torch.Tensor) else y.first + y.second).square().sum().backward()
            grads.append(x.grad)
        if step == 1:
            site.pause()  # hooks stay where they are
        else:
            site.remove()
    assert faults == []
    return sink.seen, grads, site.stacks.keys(), [watch.calls for watch in site.watched]


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("how", range(5))
def test_the_same_as_in_python(how, repeat):
    ours, theirs = told(True, how, repeat), told(False, how, repeat)
    assert ours[0] == theirs[0] and len(ours[0]) > 50
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
    assert ours[2:] == theirs[2:]
    assert {row[5] for row in ours[0]} == ({"forward", "backward"} | ({"recompute"} if repeat else set()))


def test_usual_calls_are_not_left_to_python():
    model, sink = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), Sink()
    site, faults = watched(model, sink, Clock(), compiled=True)
    seen = []
    for _ in range(2):
        site.install()
        model(torch.ones(3, 4)).sum().backward()
        site.remove()
        seen.append(sink.seen)
        sink.seen = []
        site._see = None  # what the hooks in Python call
    assert seen[0] == seen[1] != [] and faults == []


@pytest.mark.parametrize("sides", [[("forward", "input")], [("backward", "output"), ("forward", "output")]])
def test_sides_that_nobody_wants_are_left_out(sides):
    ours = told(True, 1, sides=sides)[0]
    assert ours == told(False, 1, sides=sides)[0]
    kinds = {("forward", "activation"): "activation", ("backward", "gradient"): "gradient"}
    for direction, io in sides:
        kind = kinds[direction, "activation" if direction == "forward" else "gradient"]
        assert not [row for row in ours if (row[0], row[2]) == (kind, io)]


def test_a_bias_left_to_the_caller_is_an_output():
    ours = told(True, 0, build=Adds)[0]
    assert ours == told(False, 0, build=Adds)[0]
    biases = [row for row in ours if (row[1], row[2], row[3]) == ("leaves", "output", "1")]
    # Of every microbatch of three steps; its gradient is that of the weight, not of the output.
    assert [(row[0], row[-1]) for row in biases] == [("activation", 6.0)] * 6


def test_a_site_may_leave_biases_out():
    model, sink = Adds(), Sink()
    for compiled in (True, False):
        site = ModuleSite([model], sink, Clock(), Coordinates(), lambda e, what: None, biases=False)
        if not compiled:
            site._watch = None
        site.install()
        model(torch.ones(3, 4))
        site.remove()
    assert sink.seen
    assert not [row for row in sink.seen if row[3] == "1"]


def test_containers_are_looked_into_by_python():
    ours = told(True, 0, build=Holder)[0]
    assert ours == told(False, 0, build=Holder)[0]
    assert {row[3] for row in ours if row[2] == "output"} == {"first", "second"}


def test_gradients_are_those_of_a_model_without_hooks():
    torch.manual_seed(0)
    model = Net()
    plain = [copy.deepcopy(model), torch.randn(3, 4)]
    plain[0](plain[1]).sum().backward()
    site, _ = watched(model, Sink(), Clock(), compiled=True)
    for _ in range(2):
        model.zero_grad()
        site.install()
        model(plain[1]).sum().backward()
        site.remove()
    for ours, theirs in zip(model.parameters(), plain[0].parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("against", ["activation twice", "gradient twice"])
def test_a_fault_is_handed_over_and_the_model_goes_on(against):
    found = []
    for compiled in (True, False):
        model = Net()
        site, faults = watched(model, Sink(against), Clock(), compiled)
        for _ in range(2):
            site.install()
            model(torch.ones(3, 4)).sum().backward()
            site.remove()
        found.append([(type(error), what) for error, what in faults])
    assert found[0] == found[1] and found[0]
    assert {what.split()[0] for _, what in found[0]} <= {"input", "output", "gradient"}


@pytest.mark.parametrize("against", ["activation twice", "gradient twice"])
def test_a_fault_that_is_to_stop_the_job_stops_it(against):
    class Stop(Exception):
        pass

    def strict(error, what):
        raise Stop(f"msprobe: {what} (strict: true)") from error

    model = Net()
    site, _ = watched(model, Sink(against), Clock(), True, strict, stacks=False)
    site.install()
    with pytest.raises(Stop, match=r"msprobe: .* of twice \(strict: true\)"):
        model(torch.ones(3, 4)).sum().backward()
    site.remove()


def test_a_backward_that_torch_compiles_goes_on():
    from torch._dynamo import compiled_autograd

    found = []
    for traced in (False, True):
        torch.manual_seed(0)
        model, sink = nn.Sequential(nn.Linear(4, 4), nn.GELU()), Sink()
        site, faults = watched(model, sink, Clock(), compiled=True, stacks=False)
        with compiled_autograd._enable(lambda graph: graph) if traced else contextlib.nullcontext():
            site.install()
            assert site._watch.traced == traced
            model(torch.ones(3, 4)).sum().backward()
            site.remove()
        assert faults == []
        found.append([row for row in sink.seen if row[0] == "activation"])
    assert found[0] == found[1] != []


def test_gradients_of_an_earlier_step_are_ignored():
    model, sink, clock = Net(), Sink(), Clock()
    site, _ = watched(model, sink, clock, compiled=True)
    site.install()
    loss = model(torch.ones(3, 4)).sum()
    site.remove()
    site.install()
    loss.backward()
    assert {row[0] for row in sink.seen} == {"activation"}
    site.pause()
    model(torch.ones(3, 4))
    count = len(sink.seen)
    site.resume()
    model(torch.ones(3, 4))
    assert len(sink.seen) > count
    site.remove()


def test_another_threads_evaluation_is_not_seen():
    model, sink, clock = Net(), Sink(), Clock()
    site, faults = watched(model, sink, clock, compiled=True, stacks=False)
    clock.start_step(0)
    site.install()

    def evaluate():
        with clock.elsewhere(), torch.no_grad():
            model(torch.ones(3, 4))

    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join(30)
    assert sink.seen == [] and faults == []
    model(torch.ones(3, 4))
    assert sink.seen
    site.remove()


def test_a_model_with_hooks_can_be_copied():
    model = Net()
    site, _ = watched(model, Sink(), Clock(), compiled=True)
    site.install()
    copied, shallow = copy.deepcopy(model), copy.copy(model)
    assert copied(torch.ones(3, 4)).shape == shallow(torch.ones(3, 4)).shape == (3, 4)
    site.remove()


def test_nothing_is_kept_alive():
    """Neither the site nor the sink nor a graph: hooks, places and probe point at each other."""
    model, sink = Net(), Sink()
    site, _ = watched(model, sink, Clock(), compiled=True)
    site.install()
    loss = model(torch.ones(3, 4, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    site.remove()
    dead = [weakref.ref(one) for one in (sink, site, model)]
    del site, sink, model, loss
    gc.collect()
    assert [one() for one in dead] == [None, None, None]


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        (int, False),
        (torch.Size, False),
        (nn.Parameter, False),
        (dict, True),
        (Both, True),
        (object, False),
        (list, True),
    ],
)
def test_what_can_hold_a_tensor(kind, holds):
    assert may_hold_tensors(kind) == holds
