"""Gradients that are sums: of an input that was broadcast, and of one that stands in two places of a call."""

import numpy as np
import pytest
import torch

from tests.unit.job.features.perturb.test_ancestor_defects import examined

MODES = ["improve_precision", "to_cpu"]


def _turned(x):
    """The halves (a, b) of a row become (-b, a): its product with the row is zero, but half of the terms are not."""
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _cancelling(multiply):
    """A product whose gradient with respect to its second factor, of one column, cancels to nothing."""

    def function(x):
        factor = (x.detach()[:, :1].float().sigmoid() + 0.5).to(x.dtype).requires_grad_()
        with torch.no_grad():
            rest = _turned(x) - x * factor
        return multiply(x, factor) + rest

    return function


@torch.library.custom_op("sums_low::mul", mutates_args=())
def _mul_low(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return x * factor


def _in_16_bits(ctx, given):
    x, factor = ctx.saved_tensors
    terms = given * x
    if x.dtype is torch.float64:
        return given * factor, terms.sum(-1, keepdim=True)
    total = torch.zeros(len(x), 1, dtype=torch.bfloat16)
    for column in range(x.shape[-1]):
        total += terms[:, column : column + 1].bfloat16()
    return given * factor, total.to(factor.dtype)


_mul_low.register_autograd(_in_16_bits, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_that_cancels_is_no_fault(tmp_path, mode, dtype):
    torch.manual_seed(5)
    section = {"budget": "all", "stage": "backward", "mode": mode, "rows": "all"}
    _, rows, _ = examined(tmp_path, _cancelling(torch.mul), torch.randn(2048, 64).to(dtype), section, backward=True)
    (row,) = [row for row in rows if row["shape"] == [2048, 1]]
    assert 0 < row["severity"] < 1, row
    assert [row for row in rows if row["verdict"] != "ok"] == []


def test_its_error_is_held_against_its_terms():
    """The figure itself: 16 units of the size of the terms, their sum's rounding and the answer to the nudge."""
    from msprobe_megatron.job.features.perturb.judge.checks import CheckedCall, whole_gradient
    from msprobe_megatron.job.features.perturb.judge.tolerance import nudge
    from msprobe_megatron.job.features.perturb.judge.verdict import COLUMN, WIDTH

    torch.manual_seed(6)
    x, factor = torch.randn(32, 64), torch.rand(32, 1)
    given = _turned(x)
    live = (given * x).sum(-1, keepdim=True) + 1e-6

    def product(some, more):
        (left, right), _, gradient = some
        right = right.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(left * right, right, gradient)[0]

    line = torch.full((WIDTH,), torch.nan, dtype=torch.float64)
    case = CheckedCall("torch.mul", "elementwise", ((x, factor), {}, given), {}, live, lambda y: y, product, 16, 1)
    whole_gradient(1)(case, line)

    exact = (given.double().numpy() * x.double().numpy()).sum(-1)
    size = np.sqrt(np.square(given.double().numpy() * x.double().numpy()).sum(-1))
    moved = [nudge(part.double(), 2.0**-22).numpy() for part in (given, x)]
    answer = np.abs((moved[0] * moved[1]).sum(-1) - exact)
    allowed = (4 * 4 + 8) * 2.0**-23 * size + 4 * 8 * answer
    expected = (np.abs(live.double().numpy()[:, 0] - exact) / allowed).max()
    assert float(line[COLUMN["ref_over"]]) == pytest.approx(expected, rel=1e-6)
    assert case.terms == 64


@pytest.mark.parametrize("mode", MODES)
def test_a_sum_in_16_bits_is_found(tmp_path, mode):
    torch.manual_seed(7)
    section = {"budget": "all", "stage": "backward", "mode": mode, "rows": "all"}
    multiply = torch.ops.sums_low.mul
    _, rows, _ = examined(tmp_path, _cancelling(multiply), torch.randn(64, 64), section, backward=True)
    found = [(row["name"], row["path"], row["verdict"]) for row in rows if row["verdict"] != "ok"]
    assert found == [("layers.0/sums_low.mul.0", "1", "wrong")]


@pytest.mark.parametrize("mode", [*MODES, "no_change"])
def test_a_tensor_that_stands_in_two_places(tmp_path, mode):
    """The gradient of `y * y` comes through two edges; so does the one that it is compared with."""
    section = {"budget": "all", "stage": "backward", "mode": mode}
    _, rows, _ = examined(tmp_path, lambda x: (y := x + 1) * y, torch.randn(6, 6), section, backward=True)
    assert "layers.0/torch.Tensor.mul.0" in {row["name"] for row in rows}
    assert [row for row in rows if row["verdict"] != "ok"] == []


@torch.library.custom_op("sums_odd::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _never_the_same(ctx, given):
    _never_the_same.calls += 1
    last_place = 2.0**-22 * (_never_the_same.calls % 2)  # of 2: no more than rounding may do
    return given * (2 + last_place)


_never_the_same.calls = 0
_twice.register_autograd(_never_the_same)


@pytest.mark.parametrize("mode", ["no_change", "improve_precision"])
def test_a_gradient_that_is_another_each_time_is_found(tmp_path, mode):
    section = {"budget": "all", "stage": "backward", "mode": mode}
    _, rows, _ = examined(tmp_path, torch.ops.sums_odd.twice, torch.randn(64, 8), section, backward=True)
    assert "nondeterministic" in {row["verdict"] for row in rows if "twice" in row["name"]}
