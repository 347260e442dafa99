"""API calls in plain torch: what is seen, under which name, with which gradients; and what is left as it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, relu
from torch.utils.checkpoint import checkpoint

from msprobe_megatron import native
from msprobe_megatron.clock import Clock
from msprobe_megatron.sites import compiled_calls
from msprobe_megatron.sites.api import ApiSite
from msprobe_megatron.sites.api_names import name_of
from msprobe_megatron.sites.frames import ModuleFrames
from tests.sites.functions import Double


class Seen:
    """A sink that keeps copies of all it is told."""

    def __init__(self, pattern="", modes=None):
        self.rows, self.pattern, self.modes = {}, pattern, modes

    def wants(self, name):
        return self.pattern in name

    def wants_io(self, direction, io):
        return self.modes is None or (direction, io) in self.modes

    def see(self, place, tensor, microbatch, phase):
        key = (place.kind, place.name, place.io, place.path, phase)
        assert key not in self.rows
        self.rows[key] = tensor.detach().clone()
        tensor + 1  # what a sink does with tensors is never itself seen


def faulty(error, where):
    raise AssertionError(where) from error


@pytest.fixture(params=["compiled", "python"])
def watch(request, monkeypatch):
    native.load()
    if request.param == "python":
        monkeypatch.setattr(compiled_calls.native, "look", lambda: None)
    elif native.load_look() is None:
        pytest.skip(f"no compiled calls: {native.why_no_look()}")
    sites = []

    def start(module, preset="all", sink=None):
        clock, sink = Clock(), sink or Seen()
        clock.start_step(0)
        frames = ModuleFrames([module], clock, faulty)
        site = ApiSite(frames, sink, clock, faulty, preset, True, 0)
        frames.install()
        site.install()
        sites.append((site, frames))
        return sink, site

    yield start
    for site, frames in sites:
        site.remove()
        frames.remove()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = relu(self.linear(x))
        a, b = torch.split(y @ y.t(), 2)
        return Double.apply(a.sum() * F.silu(b).mean())


def test_every_way_to_call_is_seen_and_named(watch):
    block = Block()
    sink, _ = watch(block)
    block(torch.randn(4, 4))
    names = {key[1] for key in sink.rows}
    assert names == {
        "linear/torch.nn.functional.linear.0",
        "model/torch.relu.0",
        "model/torch.Tensor.t.0",
        "model/torch.Tensor.matmul.0",
        "model/torch.functional.split.0",
        "model/torch.Tensor.sum.0",
        "model/torch.nn.functional.silu.0",
        "model/torch.Tensor.mean.0",
        "model/torch.Tensor.mul.0",
        "model/tests.sites.functions.Double.0",
    }
    paths = {key[2:4] for key in sink.rows if "split" in key[1]}
    assert paths == {("input", "0"), ("output", "0"), ("output", "1")}


def test_gradients_of_inputs_and_outputs_are_those_of_autograd(watch):
    torch.manual_seed(0)
    x = torch.randn(3, 3, requires_grad=True)
    w = torch.randn(3, 3, requires_grad=True)

    def network(record):
        a = x * 1.0
        b = a @ w
        c = F.silu(b)
        record.update(a=a, b=b, c=c)
        return (c + a).sum()  # a has two uses: the gradient of the product's input is its own share only

    plain = {}
    loss = network(plain)
    b_grad, c_grad = torch.autograd.grad(loss, (plain["b"], plain["c"]), retain_graph=True)
    sink, _ = watch(nn.Module())
    network({}).backward()
    rows = {key[:4]: value for key, value in sink.rows.items() if key[4] == "backward"}

    def gradient(name, io, path):
        return rows["gradient", f"outside/{name}.0", io, path]

    assert torch.equal(gradient("torch.nn.functional.silu", "output", ""), c_grad)
    assert torch.equal(gradient("torch.nn.functional.silu", "input", "0"), b_grad)
    assert torch.equal(gradient("torch.Tensor.matmul", "output", ""), b_grad)
    assert torch.equal(gradient("torch.Tensor.matmul", "input", "0"), b_grad @ w.detach().t())
    assert torch.equal(gradient("torch.Tensor.matmul", "input", "1"), plain["a"].detach().t() @ b_grad)


def test_results_and_gradients_are_those_without(watch):
    torch.manual_seed(1)
    block, x = Block(), torch.randn(4, 4)
    block(x).backward()
    want = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    watch(block)
    block(x).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(block.parameters(), want, strict=True))


def test_nothing_is_replaced_and_all_is_put_back(watch):
    before = (F.gelu, torch.relu, torch.Tensor.add, torch.autograd.Function.__dict__["apply"])
    _, site = watch(nn.Module())
    assert (F.gelu, torch.relu, torch.Tensor.add) == before[:3]
    site.remove()
    site.remove()
    assert torch.autograd.Function.__dict__["apply"] is before[3]
    assert torch.overrides._get_current_function_mode() is None


def test_an_in_place_call_shows_its_input_as_it_was(watch):
    sink, _ = watch(nn.Module())
    x = torch.ones(3)
    x.add_(1)
    rows = {key[2]: value.tolist() for key, value in sink.rows.items()}
    assert rows == {"input": [1, 1, 1], "output": [2, 2, 2]}


def test_calls_of_repeated_modules_are_seen_within_backward(watch):
    """`loss.backward()` is itself a call; a module repeated inside it is seen all the same."""
    block = Block()
    sink, _ = watch(block)
    checkpoint(block, torch.randn(4, 4, requires_grad=True), use_reentrant=False).backward()
    forward = {key[:4] for key in sink.rows if key[0] == "activation" and key[4] == "forward"}
    again = {key[:4] for key in sink.rows if key[4] == "recompute"}
    assert ("activation", "model/torch.relu.0", "output", "") in again
    assert again <= forward
    assert torch.overrides._get_current_function_mode() is not None


def test_a_call_that_raises_leaves_the_site_working(watch):
    sink, _ = watch(nn.Module())
    with pytest.raises(RuntimeError):
        torch.matmul(torch.ones(2, 3), torch.ones(2, 3))
    torch.relu(torch.ones(2))
    assert ("activation", "outside/torch.relu.0", "output", "", "forward") in sink.rows


def test_other_modes_may_come_and_go(watch):
    _, site = watch(nn.Module())
    with torch.device("cpu"):
        site.remove()
        assert torch.zeros(1).device.type == "cpu"
    assert torch.overrides._get_current_function_mode() is None


def test_selection(watch):
    sink, _ = watch(nn.Module(), sink=Seen("relu", {("forward", "output")}))
    F.silu(relu(torch.ones(2, requires_grad=True))).sum().backward()
    assert {key[:4] for key in sink.rows} == {("activation", "outside/torch.relu.0", "output", "")}


@pytest.mark.parametrize(
    ("function", "core", "focus", "all_"),
    [
        (F.linear, True, True, True),
        (torch.Tensor.matmul, True, True, True),
        (torch.Tensor.sum, True, True, True),
        (torch.Tensor.add, False, True, True),
        (torch.Tensor.view, False, False, True),
        (torch.Tensor.__getitem__, False, False, True),
        (torch.Tensor.size, False, False, False),
        (torch.Tensor.shape.__get__, False, False, False),
        (torch.Tensor.backward, False, False, False),
        (torch.empty_like, False, False, False),
    ],
)
def test_presets(function, core, focus, all_):
    found = [name_of(function, preset) is not None for preset in ("core", "focus", "all")]
    assert found == [core, focus, all_]


def test_compiled_code_is_not_compiled_again(watch):
    """A mode that is on makes torch.compile trace it into other kernels; so it is off in compiled code."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    # Other tests of this process may have put the emulation in place, where compiling does nothing.
    compile_ = getattr(torch.compile, "__wrapped__", torch.compile)
    function = compile_(lambda x: F.silu(x) * x, backend=backend)
    x = torch.randn(4)
    want = function(x)
    _, site = watch(nn.Module())
    assert torch.equal(function(x), want)
    assert len(compiled) == 1
    assert torch.overrides._get_current_function_mode() is site._mode
    site.remove()
    assert torch.equal(function(x), want) and len(compiled) == 1
    assert torch._dynamo.eval_frame.set_eval_frame is torch._C._dynamo.eval_frame.set_eval_frame


def gradients_of(sink, name):
    return {
        (io, path): value
        for (kind, full, io, path, _), value in sink.rows.items()
        if (kind, full) == ("gradient", name)
    }


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
@pytest.mark.parametrize("biased", [True, False])
def test_gradients_of_all_inputs_also_behind_other_nodes(watch, shape, biased):
    """`F.linear` transposes its weight, and flattens an input of three dimensions: nodes between the call and them."""
    weight, bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5)) if biased else None
    x = torch.randn(shape, requires_grad=True)
    inputs = [x, weight, *([bias] if biased else [])]
    expected = torch.autograd.grad(F.linear(x * 1, weight, bias).pow(2).sum(), inputs)
    sink, _ = watch(nn.Module())
    F.linear(x * 1, weight, bias).pow(2).sum().backward()
    found = gradients_of(sink, "outside/torch.nn.functional.linear.0")
    assert set(found) == {("output", ""), *(("input", str(i)) for i in range(len(inputs)))}
    for index, gradient in enumerate(expected):
        torch.testing.assert_close(found["input", str(index)], gradient)
        assert torch.equal(inputs[index].grad, gradient)
    assert ("activation", "outside/torch.nn.functional.linear.0", "input", "1", "forward") in sink.rows


def test_an_input_that_is_used_twice_has_the_sum_of_both_ways(watch):
    x = torch.randn(3, requires_grad=True)
    sink, _ = watch(nn.Module())
    torch.mul(x, x).sum().backward()
    found = gradients_of(sink, "outside/torch.mul.0")
    # one tensor at two places: the graph does not tell which share is whose, so both shares come under the last
    assert [key for key in found if key[0] == "input"] == [("input", "1")]
    torch.testing.assert_close(found["input", "1"], 2 * x.detach())


def test_the_share_of_a_call_is_not_that_of_others(watch):
    x = torch.randn(3, requires_grad=True)
    sink, _ = watch(nn.Module())
    (torch.mul(x, 2) + torch.mul(x, 5)).sum().backward()
    for number, factor in ((0, 2.0), (1, 5.0)):
        found = gradients_of(sink, f"outside/torch.mul.{number}")["input", "0"]
        assert torch.equal(found, torch.full((3,), factor))


def test_a_call_in_place_has_the_gradient_of_what_it_changed(watch):
    x = torch.randn(3, requires_grad=True)
    sink, _ = watch(nn.Module())
    y = x * 2
    y.mul_(3)
    y.sum().backward()
    assert torch.equal(gradients_of(sink, "outside/torch.Tensor.mul_.0")["input", "0"], torch.full((3,), 3.0))


def test_what_a_call_takes_from_elsewhere_is_not_walked_into(watch):
    """A function that also uses a tensor which is no argument: nodes older than the call belong to others."""
    x = torch.randn(3, requires_grad=True)
    elsewhere = x * 7
    sink, site = watch(nn.Module())
    site.called("own", lambda a: a * elsewhere, (x,), {}).sum().backward()
    torch.testing.assert_close(gradients_of(sink, "outside/own.0")["input", "0"], elsewhere.detach())
    torch.testing.assert_close(x.grad, 14 * x.detach())


def test_operators_of_a_namespace_are_seen(watch):
    library = torch.library.Library("msprobe_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    sink, _ = watch(nn.Module())
    torch.ops.msprobe_test.twice(torch.ones(2))
    assert any("twice" in key[1] for key in sink.rows), sink.rows.keys()


def test_a_fault_at_the_entry_of_compiled_code_leaves_it_running(monkeypatch):
    from msprobe_megatron.sites import compiled_regions, mode_stack

    compile_ = getattr(torch.compile, "__wrapped__", torch.compile)
    function = compile_(lambda x: F.silu(x) * x, backend="eager")
    x = torch.randn(4)
    want = function(x)
    faults = []
    regions = compiled_regions.CompiledRegions(
        torch.overrides.BaseTorchFunctionMode(), lambda *fault: faults.append(fault)
    )
    regions.install()

    def broken(mode):
        raise KeyError("injected")

    monkeypatch.setattr(mode_stack, "is_on", broken)
    try:
        assert torch.equal(function(x), want)
    finally:
        regions.remove()
    assert faults and all(where == "entry of compiled code" for _, where in faults)
    assert torch._dynamo.eval_frame.set_eval_frame is torch._C._dynamo.eval_frame.set_eval_frame
