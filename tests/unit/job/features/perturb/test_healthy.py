"""Healthy operators on awkward inputs, as real models have them, are not reported; the same ones, broken, are."""

import math

import pytest
import torch
from torch.nn import functional as F

from msprobe_megatron.job.features.perturb.judge.checks import terms_of_gradient
from msprobe_megatron.job.features.perturb.select.sampling import terms_of
from tests.unit.job.features.perturb.test_ancestor_defects import examined

EXACT = ["improve_precision", "to_cpu"]


def found(rows):
    assert rows
    return [(row["op"], row["verdict"]) for row in rows if row["verdict"] != "ok"]


@pytest.mark.parametrize("mode", ["add_noise", "bit_noise"])
def test_the_norm_of_all_gradients_is_not_fragile(tmp_path, mode):
    """It adds a million squares in 32 bits: what their order loses is more than a nudge of each moves."""
    torch.manual_seed(1)
    x = torch.randn(1 << 20) * torch.logspace(-6, 0, 1 << 20)
    _, rows, _ = examined(tmp_path, lambda x: x.norm(), x, {"mode": mode, "list": ["norm"]})
    assert found(rows) == []
    assert rows[0]["threshold"] == pytest.approx(8 * math.sqrt(1 << 20))


@pytest.mark.parametrize(("function", "terms"), [(lambda x: x @ x.t(), 48), (lambda x: x.sum(-1), 48), (torch.exp, 1)])
def test_a_condition_number_is_held_against_the_number_of_terms(tmp_path, function, terms):
    _, rows, _ = examined(tmp_path, function, torch.randn(16, 48), {"mode": "add_noise", "budget": "all"})
    limit = 64.0 if terms == 1 else 8 * math.sqrt(terms)
    assert [row["threshold"] for row in rows if row["op"] != "torch.Tensor.t"] == [pytest.approx(limit)]


def _attention_scores():
    """Causal, and sure of themselves: in many rows one probability is nearly 1."""
    scores = 6 * torch.randn(4, 64, 64)
    return scores.masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -10000.0)


def _of_nearly_equal_gradients(function):
    """The gradient of a softmax cancels where what comes back is nearly the same for all of a row."""
    return lambda x: function(x) * (5 + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(x))


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_the_gradient_of_a_softmax_that_is_sure(tmp_path, name, dtype, mode):
    torch.manual_seed(2)
    section = {"mode": mode, "stage": "backward", "list": [name], "rows": "all"}
    function = _of_nearly_equal_gradients(lambda x: getattr(F, name)(x, -1))
    _, rows, _ = examined(tmp_path, function, _attention_scores().to(dtype), section, backward=True)
    assert found(rows) == []
    assert 0 < rows[0]["severity"] < 1


@torch.library.custom_op("sure::softmax", mutates_args=())
def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _without_the_sum(ctx, given):
    (y,) = ctx.saved_tensors
    wide = y.dtype is torch.float64
    return y * (given - (y * given).sum(-1, keepdim=True) * (1.0 if wide else 0.9))


_softmax.register_autograd(_without_the_sum, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))


@pytest.mark.parametrize("mode", EXACT)
def test_the_gradient_of_a_softmax_that_is_wrong(tmp_path, mode):
    torch.manual_seed(2)
    section = {"mode": mode, "stage": "backward", "list": ["softmax"], "rows": "all"}
    function = _of_nearly_equal_gradients(torch.ops.sure.softmax)
    _, rows, _ = examined(tmp_path, function, _attention_scores().bfloat16(), section, backward=True)
    assert found(rows) == [("sure.softmax", "wrong")]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_gelu_of_negative_numbers(tmp_path, approximate):
    torch.manual_seed(3)
    x = torch.randn(64, 512) / 2 - 3.5
    section = {"list": ["gelu"], "rows": "all"}
    _, rows, _ = examined(tmp_path / "a", lambda x: F.gelu(x, approximate=approximate), x, section)
    assert found(rows) == []
    assert rows[0]["severity"] > 0.01


@torch.library.custom_op("negative::gelu", mutates_args=())
def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) if x.dtype is torch.float64 else F.gelu(x) + 4e-6 * x


def test_a_gelu_of_negative_numbers_that_is_wrong(tmp_path):
    torch.manual_seed(3)
    section = {"list": ["gelu"], "rows": "all"}
    _, rows, _ = examined(tmp_path, torch.ops.negative.gelu, torch.randn(64, 512) / 2 - 3.5, section)
    assert found(rows) == [("negative.gelu", "wrong")]


@pytest.mark.parametrize("mode", EXACT)
def test_the_gradients_of_a_convolution(tmp_path, mode):
    """A weight's is a sum over all places of all images."""
    torch.manual_seed(4)
    weight = torch.randn(8, 4, 3, 3, requires_grad=True)
    section = {"mode": mode, "stage": "backward", "list": ["conv2d"], "rows": "all"}
    _, rows, _ = examined(
        tmp_path, lambda x: F.conv2d(x, weight, padding=1), torch.randn(4, 4, 32, 32), section, backward=True
    )
    assert found(rows) == []
    assert {tuple(row["shape"]) for row in rows} == {(4, 4, 32, 32), (8, 4, 3, 3)}


def test_terms_of_products_and_of_their_gradients():
    x, w = torch.ones(5, 6, 16, 16), torch.ones(7, 6, 3, 3)
    y = F.conv2d(x, w)
    assert terms_of("gemm", (x, w, None), y, "torch.nn.functional.conv2d") == 6 * 3 * 3
    assert terms_of_gradient("gemm", 54, y, w) == 5 * 14 * 14
    turned = F.conv_transpose2d(y, w)
    assert terms_of("gemm", (y, w), turned, "torch.nn.functional.conv_transpose2d") == 7 * 3 * 3
    tokens, matrix = torch.ones(32, 2, 10), torch.ones(20, 10)
    y = F.linear(tokens, matrix)
    assert terms_of("gemm", (tokens, matrix), y, "torch.nn.functional.linear") == 10
    assert terms_of_gradient("gemm", 10, y, matrix) == 64
    assert terms_of_gradient("gemm", 10, y, tokens) == 20


@pytest.mark.parametrize("profile", ["ulp", "msprobe"])
@pytest.mark.parametrize("rubbish", [0.0, float("nan"), 1e30])
def test_what_a_product_does_not_read_is_not_what_is_nudged(tmp_path, rubbish, profile):
    """Scores of attention are added to memory that nobody has written to, times 0."""

    def scores(x):
        return torch.baddbmm(torch.full((4, 16, 16), rubbish), x, x.transpose(1, 2), beta=0.0, alpha=0.25)

    torch.manual_seed(5)
    section = {"mode": "add_noise", "profile": profile, "list": ["baddbmm"]}
    _, rows, _ = examined(tmp_path, scores, torch.randn(4, 16, 8), section)
    if profile == "ulp":
        assert found(rows) == []
        assert rows[0]["kappa"] > 0.1
        assert rows[0]["different"] > 0
    else:
        assert rows[0]["max_rel"] != 0


def test_such_memory_may_be_another_s_when_gradients_pass(tmp_path):
    """Layers share it: what was written to it since does not keep the backward of a product from being examined."""
    memory = torch.zeros(4, 16, 16)

    def scores(x):
        y = torch.baddbmm(memory, x, x.transpose(1, 2), beta=0.0)
        memory.fill_(3.0)
        return y

    section = {"mode": "no_change", "stage": "backward", "list": ["baddbmm"]}
    _, rows, _ = examined(tmp_path, scores, torch.randn(4, 16, 8), section, backward=True)
    assert found(rows) == []
    assert len(rows) == 2
