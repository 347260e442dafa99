"""What is examined when (budget, layers, microbatches, modules), fixes of the backward, and what is written of it."""

import csv
import json

import pytest
import torch
from torch.nn import functional as F

from msprobe_megatron.analysis.diagnose.diagnose import diagnose
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.cli import main
from msprobe_megatron.config import ConfigError, Overrides, from_document
from msprobe_megatron.job.features.perturb.fix import both, fixed
from msprobe_megatron.job.features.perturb.select.selecting import Cost, LayerConstants, Schedule
from msprobe_megatron.report.msprobe import free_benchmark
from tests.jobs.distributed.layouts import flags_of
from tests.unit.job.features.perturb import faulty
from tests.unit.job.features.perturb.faulty import LAYER, Model, found, train
from tests.unit.job.features.perturb.test_ancestor_defects import examined

FP32 = torch.float32


def test_a_plan_takes_every_call_once_a_round_and_keeps_to_its_share():
    costs = {f"decoder.layers.{i}.mlp/torch.mul.{k}": Cost(1000.0, 2000.0) for i in range(8) for k in range(20)}
    plan = Schedule(costs, share=0.05)
    taken = [name for ordinal in range(plan.round_length) for name in plan.step(ordinal).calls]
    assert sorted(taken) == sorted(costs)
    spent = sum(cost.examined for cost in costs.values()) / plan.round_length
    assert spent <= plan.limit
    assert plan.step(plan.round_length).calls == plan.step(0).calls


def test_ranks_of_a_group_choose_alike():
    """Experts have other numbers and other tokens on another rank; everything else is the same."""
    name = "decoder.layers.{}.self_attention/torch.bmm.{}"
    common = {name.format(i, k): Cost(500.0, 900.0) for i in range(4) for k in range(6)}

    def of_rank(first, tokens):
        name = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1/torch.matmul.0"
        return Schedule({**common, **{name.format(first + k): Cost(tokens, tokens) for k in range(2)}}, 0.05)

    left, right = of_rank(0, 10.0), of_rank(2, 99999.0)
    assert left.round_length == right.round_length
    for ordinal in range(left.round_length):
        here, there = left.step(ordinal).calls, right.step(ordinal).calls
        assert here == {name.replace("experts.2.", "experts.0.").replace("experts.3.", "experts.1.") for name in there}


def test_with_a_budget_all_calls_have_their_turn(tmp_path, monkeypatch):
    from msprobe_megatron.job.features.perturb import modules
    from msprobe_megatron.job.features.perturb.select import selecting

    # As if examining were cheap, so that a round has few steps.
    monkeypatch.setattr(selecting, "_EXAMINED", 5.0)
    monkeypatch.setattr(modules, "_EXAMINED", 5.0)
    monkeypatch.setattr(modules, "_GUARDED", 0.0)
    train(Model(FP32), {"budget": "50%"}, tmp_path / "some", steps=10)
    train(Model(FP32), {"budget": "all"}, tmp_path / "all", steps=2)

    def names(out):
        return {name for (name,) in open_run(out).perturb_rows().project("name").distinct().fetchall()}

    assert names(tmp_path / "some") == names(tmp_path / "all")
    steps = open_run(tmp_path / "some").perturb_rows().aggregate("step, count(*)", "step").fetchall()
    assert 0 not in dict(steps), "the first step is only watched"
    assert max(dict(steps).values()) < len(names(tmp_path / "all"))


def test_layers_and_microbatches_are_kept_to(tmp_path):
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from tests.support.forked import run_forked

    section = "{modules: [linear_qkv, core_attention], layers: [1, 2], microbatches: [3]}"
    (tmp_path / "probe.yaml").write_text(f"strict: true\nsteps: [1]\nperturb: {section}\n")
    argv = [*flags_of("single", dropout=False), "--msprobe-config", str(tmp_path / "probe.yaml")]
    run_forked(1, lambda flags: run(flags).losses, [*argv, "--msprobe-output", str(tmp_path / "out")])
    rows = open_run(tmp_path / "out").perturb_rows().project("step, microbatch, name, op").fetchall()
    assert {(step, microbatch) for step, microbatch, _, _ in rows} == {(1, 3)}
    assert {name for _, _, name, _ in rows} == {
        f"decoder.layers.{layer}.self_attention.{part}" for layer in (1, 2) for part in ("linear_qkv", "core_attention")
    }
    assert found(tmp_path / "out")[0] == []


def test_scope_takes_names_of_both_kinds(tmp_path):
    def function(x):
        return F.softmax(F.softmax(x, -1), -1)

    for number, scope in enumerate(["layers.0/torch.nn.functional.softmax.1", "Functional.softmax.1.forward"]):
        _, rows, _ = examined(tmp_path / str(number), function, torch.randn(4, 4), {"scope": [scope]}, steps=2)
        assert [row["name"] for row in rows] == ["layers.0/torch.nn.functional.softmax.1"] * 2


def test_fix_of_the_backward_only():
    x = torch.randn(5, 7, dtype=torch.bfloat16, requires_grad=True)
    given = torch.randn(5, 7, dtype=torch.bfloat16)
    live = torch.softmax(x, -1)
    better = torch.softmax(x.float(), -1)
    y = fixed(torch.softmax, (x, -1), {}, "improve_precision", "backward")
    assert torch.equal(y, live)
    (gradient,) = torch.autograd.grad(y, x, given)
    (expected,) = torch.autograd.grad(better.to(torch.bfloat16), x, given)
    assert torch.equal(gradient, expected)
    assert both(better, 3) == 3


def test_fix_keeps_the_dtype_that_a_call_asks_for():
    x = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    for kwargs in ({}, {"dtype": torch.float32}):
        y = fixed(torch.softmax, (x, -1), kwargs, "improve_precision", "forward")
        assert y.dtype is torch.softmax(x, -1, **kwargs).dtype
        assert y.requires_grad


def test_fix_must_be_the_same_on_every_rank(tmp_path):
    from msprobe_megatron import attach

    document = {"ranks": [0], "perturb": {"handler": "fix", "list": ["softmax"]}}
    with pytest.raises(ConfigError, match="ranks: 0.*must be the same on every rank; accepted: ranks: all"):
        attach(Model(FP32), None, from_document(document, "test", Overrides(output=str(tmp_path / "out"))))


def test_a_module_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"perturb.modules: \['nosuch'\] matches no module; accepted: part of a name"):
        train(Model(FP32), {"modules": ["nosuch"]}, tmp_path / "out")


def test_a_call_that_is_not_there_is_told(tmp_path):
    _, rows, session = examined(tmp_path, lambda x: x + 1, torch.ones(2), {"list": ["nosuch"]})
    assert rows == []
    assert "perturb: 'nosuch' matches no call or module of this rank" in session.not_happened()


def test_constants_that_grow_with_depth_are_not_odd():
    structure = LayerConstants()
    for layer in range(6):
        name = f"decoder.layers.{layer}.mlp/torch.Tensor.mul.{{}}"
        structure.add(name.format(0), "torch.Tensor.mul", (None, 0.1 * layer), {})
        structure.add(name.format(1), "torch.Tensor.mul", (None, 0.5 if layer != 4 else 0.25), {})
    assert [odd.name for odd in structure.outliers()] == ["decoder.layers.4.mlp/torch.Tensor.mul.1"]


def test_suspects_are_ranked_and_exported(tmp_path, capsys):
    model = Model(FP32, {"offset": 500.0}, norm=faulty.DifferenceNorm)
    model.layers[1].act = faulty.gelu_nan
    out = tmp_path / "out"
    train(model, {"budget": "all"}, out, steps=1)
    findings = [finding for finding in diagnose(open_run(out)).findings if finding.what == "suspect"]
    assert [finding.where["verdict"] for finding in findings[:2]] == ["nan", "wrong"]
    assert findings[0].where["name"] == "layers.1/faults.gelu_nan.0"
    assert findings[1].where["name"] == f"layers.{LAYER}.norm"
    assert "perturb: {handler: fix, modules: [norm], layers: [2]}" in findings[1].next
    assert main(["diagnose", str(out)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "wrong: off by" in printed and "ulp, " in printed
    assert main(["export", str(out), "--format", "free_benchmark", "--out", str(tmp_path / "csv")]) == 0
    with open(tmp_path / "csv" / "step0" / "rank0" / "free_benchmark.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = "rank,pert_mode,stage,step,api_name,max_rel,dtype,shape,output_index"
    assert ",".join(rows[0]) == ",".join(free_benchmark.COLUMNS) == columns
    named = {row["api_name"]: row for row in rows}
    row = named["Aten.gelu_nan.0.forward"]
    assert (row["rank"], row["pert_mode"], row["stage"], row["step"]) == ("0", "improve_precision", "forward", "0")
    assert (row["dtype"], row["shape"]) == ("torch.float32", "torch.Size([16, 2, 128])")


def test_communication_is_left_alone_where_nothing_of_it_is_wanted(tmp_path):
    """Perturb keeps no figures of tensors that an exchange could outdate; a dump beside it does."""
    from msprobe_megatron import attach
    from msprobe_megatron.job.sites.comm.bus import COMM_BUS

    for more, listeners in (({}, 0), ({"dump": {"level": "L0"}}, 1)):
        document = {"strict": True, "perturb": {"budget": "all"}, **more}
        out = tmp_path / f"out{listeners}"
        model, seen = Model(FP32), []
        model.layers[0].register_forward_hook(lambda *_: seen.append(len(COMM_BUS._listeners)))  # noqa: B023
        session = attach(model, None, from_document(document, "test", Overrides(output=str(out))))
        model(torch.randn(4, 2, 32)).sum().backward()
        session.step()
        session.close()
        assert min(seen) >= listeners
        assert listeners or set(seen) == {0}
        assert COMM_BUS._listeners == ()


def test_a_clean_run_has_no_suspects(tmp_path, capsys):
    train(Model(FP32), {"budget": "all"}, tmp_path / "out")
    capsys.readouterr()
    assert main(["diagnose", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_the_bench_has_the_names_of_the_table():
    from msprobe_megatron.lab.bench.tables import perturb

    names = {*perturb.EVERY_STEP, *perturb.SEED, *perturb.BUDGET}
    assert {target.partition(":")[2] for target in perturb.TARGETS} <= names
    for document in (*perturb.EVERY_STEP.values(), *perturb.SEED.values(), *perturb.BUDGET.values()):
        assert from_document(document, "bench").perturb is not None
