"""Weights that the monitor reads after the optimizer are judged as results of the step, over layouts and dtypes."""

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run
from tests.support.demo_runs import demo_run

FLAGS = "--num-layers 2 --train-iters 2 --micro-batch-size 2 --global-batch-size 4"
TP2 = f"{FLAGS} --tensor-model-parallel-size 2"


@pytest.mark.parametrize("dtype", ["", "--bf16"])
def test_weights_after_the_first_step(tmp_path, dtype):
    probe = "monitor: {parameters: true}"
    golden = open_run(demo_run(tmp_path, probe, f"{FLAGS} {dtype}", name="golden"))
    clean = open_run(demo_run(tmp_path, probe, f"{TP2} {dtype}", name="clean", world=2))
    result = compare(golden, clean)
    assert result.verdict == "agree", result.as_dict()
    table = result.table.to_pylist()
    assert sum(row["path"] == "after" and row["step"] == 0 and row["state"] == "agree" for row in table) > 20
    faulty = open_run(demo_run(tmp_path, probe, f"{TP2} {dtype}", name="faulty", world=2, fault="weights_grow"))
    found = compare(golden, faulty)
    assert found.verdict == "diverged"
    first = found.first_divergence
    assert (first.kind, first.step) == ("parameter", 0), first
