"""API calls in plain torch: what is seen, under which name, with which gradients; and what is left as it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, relu
from torch.utils.checkpoint import checkpoint

from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.measure import native
from msprobe_megatron.job.sites.calls.api import ApiSite
from msprobe_megatron.job.sites.calls.arguments import GENERATOR_STATE
from msprobe_megatron.job.sites.calls.naming import ModuleFrames, name_of
from msprobe_megatron.job.sites.compiled import bindings, loader
from tests.unit.job.sites.functions import Double


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
        monkeypatch.setattr(bindings.loader, "module", lambda: None)
    elif loader.load() is None:
        pytest.skip(f"no compiled calls: {loader.why_not()}")
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
        "model/tests.unit.job.sites.functions.Double.0",
    }
    paths = {key[2:4] for key in sink.rows if "split" in key[1]}
    assert paths == {("input", "0"), ("output", "0"), ("output", "1")}


def test_arguments_that_are_not_read_have_no_rows(watch):
    sink, site = watch(nn.Module())
    memory, x = torch.full((2, 2), float("nan")), torch.ones(2, 2)
    torch.addmm(memory, x, x, beta=0)
    torch.addmm(memory, x, x, beta=0.5)
    torch.Tensor.addmv_(memory[0], x, x[0], beta=0.0)
    torch.max(x, dim=0, out=(memory[0].clone(), torch.empty(2, dtype=torch.int64)))
    memory.copy_(x)
    rows = {(name.partition("/")[2], path) for kind, name, io, path, _ in sink.rows if io == "input"}
    read = {row for row in rows if "getitem" not in row[0] and "clone" not in row[0]}
    assert read == {
        ("torch.addmm.0", "1"),
        ("torch.addmm.0", "2"),
        ("torch.addmm.1", "0"),
        ("torch.addmm.1", "1"),
        ("torch.addmm.1", "2"),
        ("torch.Tensor.addmv_.0", "1"),
        ("torch.Tensor.addmv_.0", "2"),
        ("torch.max.0", "0"),
        ("torch.Tensor.copy_.0", "1"),
    }
    unread = {line["class"]: line["unread"] for line in site.structure if "unread" in line}
    assert unread == {
        "torch.addmm": ["0"],
        "torch.Tensor.addmv_": ["0"],
        "torch.max": ["out"],
        "torch.Tensor.copy_": ["0"],
    }


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


def test_recomputed_calls_are_seen_under_a_mode_of_the_training_code(watch):
    """As `with torch.device(…)` in a forward is one: it must not be taken for the mode of the kit."""
    block, x = Block(), torch.randn(4, 4, requires_grad=True)
    sink, _ = watch(block)

    def forward(x):
        with torch.overrides.BaseTorchFunctionMode():
            return block(x)

    checkpoint(forward, x, use_reentrant=False).backward()
    phases = {key[4] for key in sink.rows if key[1] == "model/torch.relu.0"}
    assert phases == {"forward", "recompute", "backward"}


class Guarded(nn.Module):
    """Compares states of the generator, as Megatron does around a region with random numbers of its own."""

    def forward(self, x):
        state = torch.get_rng_state()
        assert state.numel() == GENERATOR_STATE
        assert torch.all(state == torch.get_rng_state())
        return x.eq(torch.zeros(7, dtype=torch.uint8))


def test_states_of_the_host_generator_are_no_activations(watch):
    block = Guarded()
    sink, _ = watch(block)
    block(torch.zeros(7, dtype=torch.uint8))
    assert {key[1] for key in sink.rows} == {"model/torch.Tensor.eq.0"}


def keeper(file):
    """A function of a file of this name that copies and compares the state of a device's generator."""
    space = {"torch": torch}
    text = "def keep(state):\n    kept = state.clone()\n    return bool(torch.all(kept == state))\n"
    exec(compile(text, file, "exec"), space)  # a fixed text, under the name of the file
    return space["keep"]


class Keeping(nn.Module):
    def __init__(self, file):
        super().__init__()
        self.keep = keeper(file)

    def forward(self, x):
        # The size of a state of CUDA's generator: seed and offset.
        assert self.keep(torch.arange(16, dtype=torch.uint8))
        return x + 1


@pytest.mark.parametrize(
    ("file", "kept"),
    [
        ("/site-packages/torch/cuda/random.py", True),
        ("/site-packages/torch_npu/npu/random.py", True),
        ("/megatron/core/tensor_parallel/random.py", True),
        ("/model/tokens.py", False),
        ("/model/not_random.py", False),
    ],
)
def test_states_of_a_device_are_told_by_who_handles_them(watch, file, kept):
    """Whatever their size; the same bytes in a model's own file are what it computes with."""
    block = Keeping(file)
    sink, _ = watch(block)
    block(torch.ones(2))
    seen = {key[1] for key in sink.rows}
    assert "model/torch.Tensor.add.0" in seen or "model/torch.Tensor.__add__.0" in seen, seen
    assert any("clone" in name for name in seen) is not kept, seen
    assert any("all" in name for name in seen) is not kept, seen


def test_operators_of_a_namespace_are_seen(watch):
    library = torch.library.Library("msprobe_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    sink, _ = watch(nn.Module())
    torch.ops.msprobe_test.twice(torch.ones(2))
    assert any("twice" in key[1] for key in sink.rows), sink.rows.keys()


def test_a_fault_at_the_entry_of_compiled_code_leaves_it_running(monkeypatch):
    from msprobe_megatron.job.sites.calls import mode_stack

    compile_ = getattr(torch.compile, "__wrapped__", torch.compile)
    function = compile_(lambda x: F.silu(x) * x, backend="eager")
    x = torch.randn(4)
    want = function(x)
    faults = []
    regions = mode_stack.CompiledRegions(torch.overrides.BaseTorchFunctionMode(), lambda *fault: faults.append(fault))
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
