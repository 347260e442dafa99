"""States, master weights, update and agreement of the optimizers that keep them in a form of their own."""

import json
import sys

import pytest

from tests.support.forked import RankFailed, run_forked
from tests.unit.job.features.monitor.conftest import MOE, SHAPE, SHARDED, rows_of
from tests.unit.job.features.monitor.ground_truth import STEP, train
from tests.unit.job.features.monitor.test_values import check, key_of

KINDS = ("grad_reduced", "grad_clipped", "optimizer_state", "update", "parameter")
WATCHED = """
monitor: {activations: false, gradients: true, clipped: true, optimizer: true, master_weights: true, update: true,
          agreement: true, parameters: true}
"""
AWARE = SHARDED + " --bf16 --use-precision-aware-optimizer"
JOBS = {
    # The low 16 bits of master weights, moments in 16 bits with a factor, shards of four ranks.
    "remainders": (4, AWARE + " --exp-avg-dtype fp16 --exp-avg-sq-dtype bf16"),
    "half_masters": (2, AWARE + " --main-params-dtype fp16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"),
    "muon": (2, "--optimizer muon --tensor-model-parallel-size 2 --sequence-parallel"),
    "layer_wise": (2, "--optimizer dist_muon --bf16"),
}
SLOW = {"layer_wise_experts": (4, "--optimizer dist_muon --bf16 --expert-model-parallel-size 2" + MOE)}
STATES = {
    **dict.fromkeys(("remainders", "half_masters"), {"exp_avg", "exp_avg_sq", "master_weight", "sign_agreement"}),
    "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq", "sign_agreement"},
    **dict.fromkeys(
        ("layer_wise", "layer_wise_experts"),
        {"momentum_buffer", "exp_avg", "exp_avg_sq", "master_weight", "sign_agreement"},
    ),
}
ABSENT = {
    "muon": ["AdamW works on the weights themselves: no master_weight", "TensorParallelMuon keeps no exp_avg_sq",
             "TensorParallelMuon works on the weights themselves: no master_weight"],
    **dict.fromkeys(("layer_wise", "layer_wise_experts"), ["TensorParallelMuon keeps no exp_avg_sq"]),
}  # fmt: skip


def check_job(tmp_path, name, world, flags):
    config, out = tmp_path / "probe.yaml", tmp_path / "out"
    config.write_text(WATCHED)
    argv = [*f"{SHAPE} {flags}".split(), "--msprobe-config", str(config), "--msprobe-output", str(out)]
    ranks = run_forked(world, train, argv, True)
    seen = set()
    for rank, truth in enumerate(ranks):
        rows = {key_of(row): row for row in rows_of(out, rank, STEP) if row["kind"] in KINDS}
        expected = {key: value for key, value in truth["found"].items() if key.split("|")[0] in KINDS}
        some = {key for key in expected if not key.startswith("grad_reduced")}
        assert some and some <= set(rows), sorted(some - set(rows))[:5]
        for key in some | (set(expected) & set(rows)):
            check(rows[key], expected[key], f"{name}, rank {rank}: {key}")
        # Everything that is told of a state is true of one.
        told = {key for key, row in rows.items() if row["kind"] in ("optimizer_state", "update", "grad_clipped")}
        assert {key for key in told if key.split("|")[2] != "ratio"} <= set(expected)
        seen |= {key.split("|")[2] for key in told if key.startswith("optimizer_state")}
    assert seen == STATES[name]
    facts = json.loads((out / "ranks/rank_00000.json").read_text())
    assert facts["ledger"]["monitor"]["absent"] == ABSENT.get(name, []), "what an optimizer has not is said by name"
    return [optimizer for truth in ranks for optimizer in truth["optimizers"]]


@pytest.mark.parametrize("name", JOBS)
def test_values(tmp_path, name):
    optimizers = check_job(tmp_path, name, *JOBS[name])
    aware = name in ("remainders", "half_masters")
    assert set(optimizers) == {
        "DistributedOptimizer" if aware else "Float16OptimizerWithFloat16Params" if "wise" in name else "FP32Optimizer"
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_values_in_other_layouts(tmp_path, name):
    check_job(tmp_path, name, *SLOW[name])


def losses(argv):
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from tests.unit.job.features.monitor import stand_ins

    stand_ins.install_fused_adam() if "--use-precision-aware-optimizer" in argv else stand_ins.install_muon()
    return run(argv).losses


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_watching_changes_no_bit(tmp_path, name):
    (world, flags), config = JOBS[name], tmp_path / "probe.yaml"
    config.write_text(WATCHED)
    argv = f"{SHAPE} --train-iters 4 {flags}".split()
    watched = [*argv, "--msprobe-config", str(config), "--msprobe-output", str(tmp_path / "out")]
    assert run_forked(world, losses, argv) == run_forked(world, losses, watched)
    assert rows_of(tmp_path / "out", 0)


@pytest.mark.parametrize(
    ("flags", "missing"), [("--optimizer muon", "Emerging Optimizers"), (AWARE, "transformer_engine")]
)
def test_the_demo_says_what_is_missing(monkeypatch, flags, missing):
    from msprobe_megatron.lab.demo.pretrain_gpt import run

    for package in ("emerging_optimizers", "transformer_engine"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RankFailed, match=f"error: this Megatron cannot build the optimizer: .*{missing}"):
        run_forked(1, run, f"{SHAPE} {flags}".split())
