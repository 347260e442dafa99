"""Repair goes through the backward: gradients are those of the twin, and a fault of the backward alone is mended."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from msprobe_megatron.job.features.perturb.fix import ModuleFix, fixed
from tests.unit.job.features.perturb.faulty import LAYER, Model, TwoPassNorm, train

MODES = ["improve_precision", "to_cpu"]


@torch.library.custom_op("repair::gelu", mutates_args=())
def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def _wrong_below_64_bits(ctx, given):
    (x,) = ctx.saved_tensors
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (right,) = torch.autograd.grad(F.gelu(leaf), leaf, given)
    return right if x.dtype is torch.float64 else 0.5 * right


_gelu.register_autograd(_wrong_below_64_bits, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
gelu_of_wrong_gradient = torch.ops.repair.gelu


def _after_training(model, *section):
    losses = train(model, *section, steps=3)
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_fault_of_the_backward_alone(tmp_path, stage):
    """The loss of the first step is right, that of the next ones and the parameters are not; the repair brings both."""
    losses, reference = _after_training(Model(torch.float32))
    _, broken = _after_training(Model(torch.float32, act=gelu_of_wrong_gradient))
    section = {"handler": "fix", "list": ["repair.gelu"], "stage": stage}
    again, repaired = _after_training(Model(torch.float32, act=gelu_of_wrong_gradient), section, tmp_path / "out")
    assert again == pytest.approx(losses, rel=1e-6)
    error, before = (repaired - reference).abs().max(), (broken - reference).abs().max()
    assert error < 1e-3 * before
    assert before > 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_a_repaired_call_is_that_of_its_twin(mode):
    torch.manual_seed(1)
    x = torch.randn(5, 7).bfloat16().requires_grad_()
    weight = torch.randn(3, 7).bfloat16().requires_grad_()
    given = torch.randn(5, 3).bfloat16()
    y = fixed(F.linear, (x, weight), {}, mode, "forward")
    assert y.dtype is torch.bfloat16
    gradients = torch.autograd.grad(y, (x, weight), given)
    wide = given.double().numpy()
    expected = wide @ weight.detach().double().numpy(), wide.T @ x.detach().double().numpy()
    for gradient, exact in zip(gradients, expected, strict=True):
        # Rounded once, from a product in 32 bits.
        assert gradient.dtype is torch.bfloat16
        assert gradient.double().numpy() == pytest.approx(exact, rel=2.0**-8, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_the_gradients_of_a_repaired_module_are_those_of_its_twin(mode, stage):
    torch.manual_seed(2)
    norm = TwoPassNorm(32).bfloat16()
    x = torch.randn(4, 32).bfloat16()
    given = torch.randn(4, 32).bfloat16()
    live = norm(x)
    twin = TwoPassNorm(32).double()
    leaf = x.double().requires_grad_()
    wanted = torch.autograd.grad(twin(leaf), (leaf, twin.weight), given.double())
    fix = ModuleFix(mode, stage)
    fix.install("norm", norm, None, lambda: True)
    try:
        moving = x.clone().requires_grad_()
        y = norm(moving)
        gradients = torch.autograd.grad(y, (moving, norm.weight), given)
    finally:
        fix.remove()
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, live) == (stage == "backward")
    for gradient, exact in zip(gradients, wanted, strict=True):
        assert gradient.double().numpy() == pytest.approx(exact.numpy(), rel=2.0**-7, abs=2.0**-7)
    assert isinstance(norm, nn.Module) and torch.equal(norm(x), live)


def test_only_the_chosen_layer_is_repaired(tmp_path):
    """A call of one layer, by `layers`: the others run as they are."""
    seen = []

    @torch.library.custom_op("repair::watched", mutates_args=())
    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x.clone()

    watched.register_autograd(lambda ctx, given: given)
    section = {"handler": "fix", "list": ["watched"], "layers": [LAYER]}
    train(Model(torch.float32, {"act": torch.ops.repair.watched}), section, tmp_path / "out", steps=1)
    assert seen.count(torch.float64) == 1
    assert seen.count(torch.float32) >= 3
