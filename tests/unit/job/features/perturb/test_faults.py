"""Seeded faults are found and named; a healthy model is not reported; fix brings back the loss of the healthy one."""

import math

import pytest
import torch
from torch.nn import functional as F

from tests.jobs.distributed.layouts import flags_of
from tests.support.forked import run_forked
from tests.unit.job.features.perturb import faulty
from tests.unit.job.features.perturb.faulty import LAYER, Model, found, train

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HERE = f"layers.{LAYER}"
# name: dtype, fault of one layer, what all layers have, verdict, name of the operator.
FAULTS = {
    "softmax without maximum": (
        FP16, {"softmax": faulty.softmax_raw}, {"logits": 30.0}, "nan", f"{HERE}/faults.softmax_raw.0",
    ),
    "variance as a difference": (FP32, {"norm": faulty.DifferenceNorm}, {"offset": 500.0}, "wrong", f"{HERE}.norm"),
    "sum in 16 bits": (BF16, {"linear": faulty.linear_low}, {}, "wrong", f"{HERE}/faults.linear_low.0"),
    "not deterministic": (
        FP32, {"act": faulty.gelu_unsteady}, {}, "nondeterministic", f"{HERE}/faults.gelu_unsteady.0",
    ),
    "first element": (FP32, {"act": faulty.gelu_first}, {}, "wrong", f"{HERE}/faults.gelu_first.0"),
    "one NaN": (FP32, {"act": faulty.gelu_nan}, {}, "nan", f"{HERE}/faults.gelu_nan.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(tmp_path, name):
    dtype, fault, everywhere, verdict, where = FAULTS[name]
    train(Model(dtype, everywhere, **fault), {"budget": "all"}, tmp_path / "out")
    words, rows = found(tmp_path / "out")
    assert rows > 20
    assert (verdict, where) in words, words
    elsewhere = [word for word in words if not word[1].startswith(HERE) and word[0] not in ("nan", "inf")]
    assert not elsewhere, "other layers are healthy"


@pytest.mark.parametrize("name", FAULTS)
def test_without_the_fault_nothing_is_found(tmp_path, name):
    dtype, _, everywhere, _, _ = FAULTS[name]
    train(Model(dtype, everywhere), {"budget": "all"}, tmp_path / "out")
    assert found(tmp_path / "out")[0] == []


@pytest.mark.parametrize("budget", ["all", "5%"])
def test_a_wrong_constant_of_one_layer(tmp_path, budget):
    everywhere, section = {"act": faulty.tanh_gelu}, {"budget": budget}
    model = Model(BF16, everywhere)
    model.layers[LAYER].act = faulty.wrong_gelu
    train(model, section, tmp_path / "out")
    words, _ = found(tmp_path / "out")
    assert [word for word, name in words if name.startswith(f"{HERE}/torch.Tensor.mul")] == ["odd"], words
    train(Model(BF16, everywhere), section, tmp_path / "clean")
    assert found(tmp_path / "clean")[0] == []


def test_an_error_in_one_element_of_a_large_output(tmp_path):
    """256 MiB, wrong in the first element only."""

    class Large(torch.nn.Module):
        def __init__(self, act):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))
            self.act = act

        def forward(self, x):
            return self.act(x * self.weight)

    x = torch.linspace(-1, 1, 1 << 26)
    for act, expected in ((faulty.gelu_first, [("wrong", "model/faults.gelu_first.0")]), (F.gelu, [])):
        from msprobe_megatron import attach
        from msprobe_megatron.config import Overrides, from_document

        out = tmp_path / str(len(expected))
        model = Large(act)
        document = {"strict": True, "perturb": {"list": ["gelu"]}}
        session = attach(model, None, from_document(document, "test", Overrides(output=str(out))))
        model(x).detach()
        session.step()
        session.close()
        assert found(out) == (expected, 1)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_healthy_gpt_in_bf16_reports_nothing(tmp_path, stage):
    (tmp_path / "probe.yaml").write_text(f"strict: true\nperturb: {{budget: all, stage: {stage}}}\n")
    flags = [*flags_of("single", dropout=False), "--bf16", "--train-iters", "20", "--global-batch-size", "2"]
    argv = [*flags, "--msprobe-config", str(tmp_path / "probe.yaml"), "--msprobe-output", str(tmp_path / "out")]
    run_forked(1, _train_gpt, argv)
    words, rows = found(tmp_path / "out")
    assert words == []
    assert rows > 20 * 80


def _train_gpt(argv):
    from msprobe_megatron.lab.demo.pretrain_gpt import run

    return run(argv).losses


# What to write to repair each fault.
FIXES = {
    "softmax without maximum": {"list": ["softmax_raw"]},
    "variance as a difference": {"modules": ["norm"], "layers": [LAYER]},
    "sum in 16 bits": {"list": ["linear_low"]},
    "not deterministic": {"list": ["gelu_unsteady"]},
    "first element": {"list": ["gelu_first"], "layers": [LAYER]},
    "one NaN": {"list": ["gelu_nan"]},
}


@pytest.mark.parametrize("name", FAULTS)
def test_fix_restores_the_loss(tmp_path, name):
    dtype, fault, everywhere, _, _ = FAULTS[name]
    reference = train(Model(dtype, everywhere), steps=3)
    broken = train(Model(dtype, everywhere, **fault), steps=3)
    repaired = train(Model(dtype, everywhere, **fault), {**FIXES[name], "handler": "fix"}, tmp_path / "out", steps=3)
    tolerance = 1e-5 if dtype is FP32 else 2e-3  # a result of 16 bits is rounded once more or less
    assert all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(reference, repaired, strict=True))
    worst = [max(abs(a - b) for a, b in zip(reference, other, strict=True)) for other in (broken, repaired)]
    assert not worst[0] <= 2 * worst[1], "the fault changed nothing"


def test_fix_of_a_wrong_constant_by_the_code_of_another_layer(tmp_path):
    everywhere = {"act": faulty.tanh_gelu}
    reference = train(Model(FP32, everywhere))
    model = Model(FP32, everywhere)
    model.layers[LAYER].act = faulty.wrong_gelu
    assert train(model)[0] != reference[0]
    model = Model(FP32, everywhere)
    model.layers[LAYER].act = faulty.wrong_gelu
    section = {"handler": "fix", "modules": [f"/^layers.{LAYER}$/"], "twin": "sibling"}
    assert train(model, section, tmp_path / "out") == reference
