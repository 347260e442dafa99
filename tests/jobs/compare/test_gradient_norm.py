"""The gradient norm is a row of dump and monitor, equal on all ranks; a wrong norm is named as such."""

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run
from tests.support.demo_runs import demo_run

FLAGS = "--num-layers 2 --train-iters 1 --micro-batch-size 2 --global-batch-size 4 --clip-grad 1.0"
TP2 = f"{FLAGS} --tensor-model-parallel-size 2"


@pytest.mark.parametrize("probe", ["dump: {level: L0}", "monitor: {}"], ids=["dump", "monitor"])
def test_a_wrong_norm_is_the_first_divergence(tmp_path, probe):
    golden = open_run(demo_run(tmp_path, probe, FLAGS, name="golden"))
    clean = compare(golden, open_run(demo_run(tmp_path, probe, TP2, name="clean", world=2)))
    assert clean.verdict == "agree", clean.as_dict()
    norms = [row for row in clean.table.to_pylist() if row["name"] == "grad_norm"]
    assert [row["state"] for row in norms] == ["agree"]
    for fault in ("norm_counted_twice", "norm_of_this_rank"):
        found = compare(golden, open_run(demo_run(tmp_path, probe, TP2, name=fault, world=2, fault=fault)))
        assert found.verdict == "diverged"
        assert found.first_divergence.name == "grad_norm", found.first_divergence
        assert any("how the norm is computed" in hint for hint in found.hints)
