"""The compiled API calls tell the sink the very same as those in Python, in the same order, and leave less behind."""

import contextlib
import gc
import sys
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from msprobe_megatron.job.clock import Clock, Moment
from msprobe_megatron.job.measure import native
from msprobe_megatron.job.sites.calls import api
from msprobe_megatron.job.sites.calls.api import ApiSite
from msprobe_megatron.job.sites.calls.naming import ModuleFrames
from msprobe_megatron.job.sites.compiled import bindings, loader
from tests.unit.job.sites.api_scenarios import (
    SCENARIOS,
    Net,
    by_keyword,
    functions,
    hooked,
    in_place,
    lists,
    nested_modules,
    repeated,
    tuples,
    used_twice,
)
from tests.unit.job.sites.functions import Double


@dataclass
class Both:
    first: torch.Tensor
    second: object


class Sink:
    """Notes what it is told of; may have something against a place, and against sides."""

    def __init__(self, against="", sides=()):
        self.seen, self.against, self.sides = [], against, sides

    def wants(self, name):
        return "repeat" not in name

    def wants_io(self, direction, io):
        return (direction, io) not in self.sides

    def see(self, place, tensor, microbatch, phase):
        if self.against and self.against in f"{place.kind} {place.name} {place.io}":
            raise KeyError(place.name)
        figures = (type(tensor), tuple(tensor.shape), tensor.dtype, tensor.detach().double().nan_to_num().sum().item())
        self.seen.append((place.kind, place.name, place.io, place.path, place.site, microbatch, phase, *figures))


@pytest.fixture
def watched(monkeypatch):
    native.load()
    if loader.load() is None:
        pytest.skip(f"no compiled calls: {loader.why_not()}")
    open_sites = []

    def make(model, sink, clock, compiled, preset="all", fault=None):
        faults = []
        fault = fault or (lambda error, what: faults.append((repr(error), what)))
        frames = ModuleFrames([model], clock, fault)
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(bindings.loader, "module", lambda: None)
            site = ApiSite(frames, sink, clock, fault, preset, True, 0)
        assert (site._compiled is not None) == compiled
        open_sites.append((site, frames))
        return site, frames, faults

    yield make
    for site, frames in open_sites:
        site.remove()
        frames.remove()


def told(watched, compiled, scenario, preset="all", sides=(), against=""):
    torch.manual_seed(3)
    model, sink, clock = Net(scenario), Sink(against, sides), Clock()
    site, frames, faults = watched(model, sink, clock, compiled, preset)
    leaves = []
    for step in range(3):
        clock.start_step(step)
        frames.install()
        site.install()
        for microbatch in range(2):
            clock.moment = Moment(microbatch, 0)
            x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
            y = model(x)
            y.square().sum().backward(retain_graph=True)
            if microbatch:
                torch.autograd.backward(y.sum())
            leaves.append(x.grad)
        site.remove()
        frames.remove()
    leaves += [parameter.grad for parameter in model.parameters()]
    state = (clock.backward_moment, site.fired, torch.get_rng_state().tolist())
    sites = [one | {"stack": [line for line in one["stack"] if " test_" not in line]} for one in site.structure]
    return sink.seen, faults, leaves, sites, state


def same(ours, theirs):
    # One by one: of two long lists pytest takes minutes to show the difference.
    for a, b in zip(ours[0], theirs[0], strict=False):
        assert a == b
    assert len(ours[0]) == len(theirs[0])
    for a, b in zip(ours[2], theirs[2], strict=True):
        assert a is b is None or torch.equal(a, b)
    assert ours[1] == theirs[1] and ours[3:] == theirs[3:]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_same_as_in_python(watched, scenario):
    ours, theirs = told(watched, True, scenario), told(watched, False, scenario)
    same(ours, theirs)
    assert ours[1] == [] and len(ours[0]) > 50
    assert {row[0] for row in ours[0]} == {"activation", "gradient"}
    assert all(site["stack"] for site in ours[3])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_model_computes_what_it_computes_without(watched, scenario):
    torch.manual_seed(3)
    model, leaves = Net(scenario), []
    for _ in range(3):
        for microbatch in range(2):
            x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
            y = model(x)
            y.square().sum().backward(retain_graph=True)
            if microbatch:
                y.sum().backward()
            leaves.append(x.grad)
    state = torch.get_rng_state().tolist()
    _, _, ours, _, (_, _, ours_state) = told(watched, True, scenario)
    leaves += [parameter.grad for parameter in model.parameters()]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(leaves, ours, strict=True))
    assert state == ours_state


@pytest.mark.parametrize("preset", ["core", "focus"])
def test_the_same_under_other_presets(watched, preset):
    ours, theirs = (told(watched, compiled, nested_modules, preset) for compiled in (True, False))
    same(ours, theirs)
    assert len(ours[0]) > 50 and ours[1] == []


SIDES = [(direction, io) for direction in ("forward", "backward") for io in ("input", "output")]


@pytest.mark.parametrize("sides", [*([one] for one in SIDES), SIDES[:2], SIDES[2:], SIDES[1:3]])
def test_sides_that_nobody_wants_are_left_out(watched, sides):
    ours = told(watched, True, used_twice, sides=sides)
    same(ours, told(watched, False, used_twice, sides=sides))
    kind = {"forward": "activation", "backward": "gradient"}
    assert {(kind[direction], io) for direction, io in SIDES if (direction, io) not in sides} == {
        (row[0], row[2]) for row in ours[0]
    }


@pytest.mark.parametrize("kind", ["activation", "gradient"])
@pytest.mark.parametrize("io", ["input", "output"])
@pytest.mark.parametrize(("scenario", "name"), [(used_twice, "addmm.0"), (functions, "Nested.0"), (hooked, "add.0")])
def test_a_fault_is_handed_over_and_the_model_goes_on(watched, kind, io, scenario, name):
    found = []
    for compiled in (True, False):
        torch.manual_seed(3)
        probe = told(watched, True, scenario)[0]
        full = next(row[1] for row in probe if row[1].endswith(name))
        found.append(told(watched, compiled, scenario, against=f"{kind} {full} {io}"))
    same(*found)
    assert found[0][1] and all(text.startswith("KeyError") for text, _ in found[0][1])
    assert {what.split(" of ")[0] for _, what in found[0][1]} <= {"input", "output", "gradients"}


@pytest.mark.parametrize("side", ["activation {} input", "activation {} output", "gradient {} input"])
def test_a_fault_that_is_to_stop_the_job_stops_it(watched, side):
    class Stop(Exception):
        pass

    def strict(error, what):
        raise Stop(f"msprobe: {what} (strict: true)") from error

    model, clock = Net(lambda net, x: x.relu() * 2), Clock()
    site, frames, _ = watched(model, Sink(side.format("model/torch.Tensor.relu.0")), clock, True, fault=strict)
    frames.install()
    site.install()
    with pytest.raises(Stop, match=r"msprobe: .* of (torch.Tensor.relu|an API call) \(strict: true\)"):
        model(torch.ones(4, 4, requires_grad=True)).sum().backward()
    assert site._state.inside == 0


def test_usual_calls_are_not_left_to_python(watched, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("left to Python")

    for scenario in (in_place, by_keyword, lists, tuples, used_twice, functions, repeated):
        theirs = told(watched, False, scenario)
        with monkeypatch.context() as patch:
            for name in ("_before", "_after", "_await_gradients", "_hook"):
                patch.setattr(ApiSite, name, never)
            patch.setattr(api._Mode, "__torch_function__", never)
            same(told(watched, True, scenario), theirs)


def test_no_object_of_python_is_left_for_each_call(watched):
    counts = []
    for compiled in (False, True):
        model, clock = Net(lambda net, x: net.inner(x).mul(2).add(1).relu() @ x), Clock()
        sink = Sink()
        sink.see = lambda *args: None
        site, frames, _ = watched(model, sink, clock, compiled)
        losses = []
        for warm in (True, False):
            gc.collect()
            before = len(gc.get_objects())
            for _ in range(2 if warm else 20):
                frames.install()
                site.install()
                losses.append(model(torch.ones(4, 4, requires_grad=True)).sum())
                site.remove()
                frames.remove()
            gc.collect()
            counts.append((len(gc.get_objects()) - before) / 20)
    # Of seven calls. In Python each node has a dictionary with a hook in it; else the loss and its input are left.
    assert counts[1] > 14 and counts[3] < 6, counts


def test_a_backward_that_torch_compiles_takes_hooks_of_python(watched):
    from torch._dynamo import compiled_autograd

    found, hooks = [], []
    for compiled, traced in ((True, False), (True, True), (False, True)):
        torch.manual_seed(0)
        model, sink, clock = Net(lambda net, x: F.gelu(net.linear(x)) + Double.apply(x)), Sink(), Clock()
        site, frames, faults = watched(model, sink, clock, compiled)
        with compiled_autograd._enable(lambda graph: graph) if traced else contextlib.nullcontext():
            frames.install()
            site.install()
            assert site._state.traced == traced
            loss = model(torch.ones(4, 4, requires_grad=True)).sum()
            hooks.append(sum(type(one) is api._NodeHook and one[0] is site for one in gc.get_objects()))
        site.remove()
        frames.remove()
        del loss
        assert faults == []
        found.append(sink.seen)
    assert found[0] == found[1] == found[2] != []
    assert hooks[0] == 0 and hooks[1] == hooks[2] > 4


def test_hooks_of_others_keep_their_order(watched):
    """They change what goes on from a node; ours is between those from before the call and those from after it."""
    found = []
    for compiled in (True, False):
        sink, clock = Sink(), Clock()
        site, frames, faults = watched(nn.Module(), sink, clock, compiled)
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.grad_fn.register_hook(lambda inner, outer: (inner[0] * 3, None))
        frames.install()
        site.install()
        for _ in range(2):
            site.called("mine.kept", lambda x, y=y: y, (x,), {})
        y.grad_fn.register_hook(lambda inner, outer: (inner[0] + 1, None))
        y.sum().backward()
        site.remove()
        assert x.grad.tolist() == [7, 7] and faults == []
        found.append(sink.seen)
    assert found[0] == found[1]
    assert [row[-1] for row in found[0] if "mine" in row[1] and row[0] == "gradient" and row[2] == "input"] == [12, 12]


def test_gradients_of_an_earlier_step_are_ignored(watched):
    model, sink, clock = Net(nested_modules), Sink(), Clock()
    site, frames, _ = watched(model, sink, clock, True)
    frames.install()
    site.install()
    loss, other = (model(torch.ones(4, 4, requires_grad=True)).sum() for _ in range(2))
    site.remove()
    other.backward()
    site.install()
    loss.backward()
    assert {row[0] for row in sink.seen} == {"activation"}
    loss = model(torch.ones(4, 4, requires_grad=True)).sum()
    site.remove()
    site.resume()  # the same step goes on
    loss.backward()
    assert {row[0] for row in sink.seen} == {"activation", "gradient"}


def test_backward_and_forward_in_other_threads(watched):
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model, sink, clock = Net(repeated), Sink(), Clock()
        site, frames, faults = watched(model, sink, clock, compiled)
        clock.start_step(0)
        frames.install()
        site.install()
        losses = [model(torch.ones(4, 4, requires_grad=True)).sum()]
        for work in (lambda: losses[0].backward(), lambda: losses.append(model(torch.ones(4, 4)).sum())):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(60)
        losses[1].backward()
        site.remove()
        frames.remove()
        assert faults == []
        found.append(sink.seen)
    assert found[0] == found[1] and {row[6] for row in found[0]} == {"forward", "recompute", "backward"}


def test_calls_with_a_name_of_their_own(watched):
    def work(tensors, *more, held, key=None):
        return [one * 2 for one in tensors], held.first + more[17], {"a": key}

    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model, sink, clock = nn.Linear(4, 4), Sink(), Clock()
        site, frames, faults = watched(model, sink, clock, compiled)
        frames.install()
        site.install()
        x = torch.ones(4, 4, requires_grad=True)
        for _ in range(2):
            held = {"held": Both(x * 1, {"b": [x * 3]}), "key": x * 5}
            listed, added, rest = site.called("mine.work", work, ([x, x * 2], *[x * n for n in range(18)]), held)
            (sum(listed) + added + rest["a"]).sum().backward()
        site.remove()
        frames.remove()
        assert site.called("mine.work", work, ([x], *[x] * 18), held)
        assert faults == []
        found.append(sink.seen)
    assert found[0] == found[1]
    paths = {row[3] for row in found[0] if "mine.work" in row[1]}
    assert {"0.1", "18", "held.first", "held.second.b.0", "key"} <= paths


def test_what_is_not_given_as_torch_gives_it_is_passed_on(watched):
    model, sink, clock = Net(nested_modules), Sink(), Clock()
    site, frames, _ = watched(model, sink, clock, True)
    mode, x = site._mode, torch.ones(2)
    assert mode.__torch_function__(torch.add, (), (x, 1)).tolist() == [2, 2]
    assert mode.__torch_function__(torch.add, (), args=(x, 1), kwargs={"alpha": 2}).tolist() == [3, 3]
    assert mode.__torch_function__(torch.add, (), [x, 1], None).tolist() == [2, 2]
    with pytest.raises(TypeError):
        mode.__torch_function__(torch.add)
    with mode, torch.overrides.BaseTorchFunctionMode():
        assert torch.add(x, 1).tolist() == [2, 2]
    assert sink.seen == []


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_call_that_comes_again_is_not_new(watched, scenario):
    """What is known grows with the model and not with the steps, whatever the names of its calls are made of."""
    model, clock = Net(scenario), Clock()
    site, frames, faults = watched(model, Sink(), clock, True)
    known = []
    for step in range(6):
        clock.start_step(step)
        frames.install()
        site.install()
        model(torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()).square().sum().backward()
        known.append(site._compiled.known())
        site.remove()
        frames.remove()
    assert known[0] > 0 and known == [known[0]] * 6, known


def test_nothing_is_kept_alive(watched):
    """Neither the site nor the sink, nor a tensor, nor what the hooks of a graph point to."""
    model, sink, clock = Net(used_twice), Sink(), Clock()
    frames = ModuleFrames([model], clock, print)
    site = ApiSite(frames, sink, clock, print, "all", True, 0)
    x = torch.ones(4, 4, requires_grad=True)
    moment = clock.moment = Moment(7, 0)
    frames.install()
    site.install()
    loss = model(x).sum()
    held = sys.getrefcount(moment)
    loss.backward(retain_graph=True)
    site.remove()
    frames.remove()
    del loss
    assert sys.getrefcount(moment) < held - 5
    loss = model(x).sum()
    dead = [weakref.ref(one) for one in (sink, site, model, x)]
    del site, sink, model, x, frames, loss
    gc.collect()
    assert [one() for one in dead] == [None] * 4
