"""The monitor beside other things: a dump of the same steps, skipped steps, a layer-wise optimizer, recomputation."""

import json
import os

import duckdb
import pytest
import torch

from msprobe_megatron import attach
from msprobe_megatron.config import Overrides, from_document
from tests.support.forked import run_forked
from tests.unit.job.features.dump.test_synchronisation import Net, step
from tests.unit.job.features.monitor.conftest import SHAPE, rows_of
from tests.unit.job.features.monitor.ground_truth import figures


def test_a_dump_of_the_same_steps(tmp_path):
    """Both see the same numbers, and the run keeps them apart."""
    from msprobe_megatron.analysis.load.run import open_run

    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    document = {"steps": [1], "dump": {"level": "L0"}, "monitor": {"parameters": True}}
    config = from_document(document, "test", Overrides(output=str(tmp_path / "out")))
    with attach(net, optimizer, config, step=0) as session:
        for _ in range(3):
            step(net, optimizer)
    assert session.faults == []
    run = open_run(tmp_path / "out")
    assert run.steps == [0, 1, 2] and sorted(run.dumped_steps) == [1] and run.problems == []
    columns = "kind, name, io, min, max, n_zero, numel"
    kinds = "kind in ('activation', 'gradient', 'grad_reduced')"
    dumped = run.rows(step=1).filter(kinds).project(columns).fetchall()
    seen = run.monitor_rows().filter(f"step = 1 and {kinds}").project(columns).fetchall()
    assert len(dumped) == 38 and sorted(dumped) == sorted(seen)
    assert run.monitor_rows().aggregate("count(distinct step)").fetchall() == [(3,)]


def train_half(argv):
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    scales = []
    seen = []

    def before(iteration):
        scales.append(float(seen[0].get_loss_scale()))

    result = run(argv, Callbacks(ready=lambda chunks, optimizer: seen.append(optimizer), gradients=before))
    return {"skipped": [bool(s.skipped) for s in result.steps], "scales": scales}


def test_skipped_steps_and_loss_scale(tmp_path):
    config = tmp_path / "probe.yaml"
    config.write_text("monitor: {activations: false, clipped: true, update: true, master_weights: true}")
    flags = [*SHAPE.split(), "--fp16", "--initial-loss-scale", str(2.0**40), "--loss-scale-window", "2"]
    flags += ["--train-iters", "12", "--msprobe-config", str(config), "--msprobe-output", str(tmp_path / "out")]
    (truth,) = run_forked(1, train_half, flags)
    rows = rows_of(tmp_path / "out", 0)
    by_name = {name: [r["sum"] for r in rows if r["name"] == name] for name in ("skipped", "loss_scale")}
    assert [bool(value) for value in by_name["skipped"]] == truth["skipped"]
    assert True in truth["skipped"], "no step was skipped: the test shows nothing"
    assert by_name["loss_scale"] == truth["scales"]
    # Gradients of a skipped step are not finite, and none of it is hidden.
    first = [r for r in rows if r["step"] == 0 and r["kind"] == "grad_reduced"]
    assert sum(r["n_nan"] + r["n_posinf"] + r["n_neginf"] for r in first) > 0
    assert not [r for r in rows if r["step"] == 0 and r["kind"] in ("grad_clipped", "update")]


def layer_wise(out):
    """One of two ranks: Megatron's layer-wise optimizer, which gives whole parameters to ranks."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    net = Net()
    for parameter in net.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    config = OptimizerConfig(lr=0.1, bf16=False, clip_grad=0.0)
    inner = FP32Optimizer(torch.optim.Adam(net.parameters(), lr=0.1), config, lambda *a: None)
    optimizer = LayerWiseDistributedOptimizer([inner], config, ProcessGroupCollection.use_mpu_process_groups())
    document = {"monitor": {"activations": False, "gradients": False}}
    found = {}
    with attach(net, optimizer, from_document(document, "t", Overrides(output=out)), step=0) as session:
        for _ in range(2):
            session.schedule_begin("test", 1)
            net(torch.ones(2, 16)).sum().backward()
            for parameter in net.parameters():
                parameter.main_grad.copy_(parameter.grad)
            session.schedule_end()
            optimizer.step()
        states = inner.optimizer.state
        for name, parameter in net.named_parameters():
            if parameter in states:
                found[name] = figures(states[parameter]["exp_avg"])
    faults = list(session.faults)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return {"found": found, "faults": faults, "rank": int(os.environ["RANK"])}


def test_layer_wise_optimizer(tmp_path):
    pytest.importorskip("megatron.core.optimizer.layer_wise_optimizer")
    ranks = run_forked(2, layer_wise, str(tmp_path / "out"))
    for truth in ranks:
        assert truth["faults"] == []
        rows = {r["name"]: r for r in rows_of(tmp_path / "out", truth["rank"], 1) if r["io"] == "exp_avg"}
        assert rows.keys() == truth["found"].keys()
        for name, row in rows.items():
            assert row["sumsq"] == pytest.approx(truth["found"][name][3], rel=1e-6)
    assert not ranks[0]["found"].keys() & ranks[1]["found"].keys()
    assert len(ranks[0]["found"]) + len(ranks[1]["found"]) == 12


def test_recomputed_layers_are_watched_once_in_the_forward(tmp_path):
    config = tmp_path / "probe.yaml"
    config.write_text("monitor: {metrics: [attention], data: true}")
    flags = [*SHAPE.split(), "--recompute-granularity", "full", "--recompute-method", "uniform"]
    flags += ["--recompute-num-layers", "1", "--msprobe-config", str(config), "--msprobe-output", str(tmp_path / "out")]
    run_forked(1, train_half, flags)
    ledger = json.loads((tmp_path / "out/ranks/rank_00000.json").read_text())["ledger"]
    assert ledger["faults"] == []
    rows = rows_of(tmp_path / "out", 0, 1)
    for kind, io in (("activation", "output"), ("scalar", "attention_entropy"), ("data", "input")):
        forward = [
            (r["name"], r["path"], r["microbatch"])
            for r in rows
            if (r["kind"], r["io"], r["phase"]) == (kind, io, "forward")
        ]
        assert len(forward) == len(set(forward)) > 0
    again = [r for r in rows if r["phase"] == "recompute"]
    assert again and {r["kind"] for r in again} == {"activation"}
    gradients = [r for r in rows if r["kind"] == "gradient" and r["name"] == "decoder.layers.1" and r["io"] == "output"]
    assert sorted(r["microbatch"] for r in gradients) == list(range(8))


def test_everything_is_in_one_order(tmp_path):
    """`seq` is the order of execution of a rank: forward before backward before the optimizer, in each microbatch."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = from_document({"monitor": {}}, "test", Overrides(output=str(tmp_path / "out")))
    with attach(net, optimizer, config, step=0):
        step(net, optimizer)
    files = str(tmp_path / "out/monitor/rank_00000/*.parquet")
    phases = duckdb.execute(f"select phase from read_parquet('{files}') order by seq").fetchall()
    order = [phase for (phase,) in phases]
    assert order == sorted(order, key=["forward", "backward", "optimizer"].index)
