"""Biases that a module leaves to its caller are outputs of the module: a wrong one is named there."""

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run

_PROJ, _FC1, _FC2 = (
    "decoder.layers.1.self_attention.linear_proj",
    "decoder.layers.2.mlp.linear_fc1",
    "decoder.layers.1.mlp.linear_fc2",
)
# fault -> (layout, module to look at, ranks)
_FAULTS = {
    "row_bias_of_every_rank": ("tp2", _PROJ, [0, 1]),
    "row_bias_lost": ("tp2_sp", _FC2, []),  # no rank has it
    "column_bias_of_rank_0": ("tp2", _FC1, [0, 1]),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_wrong_bias_is_named_at_its_module(runs, fault):
    layout, module, ranks = _FAULTS[fault]
    result = compare(open_run(runs.clean("single")), open_run(runs.faulty(layout, fault)))
    first = result.first_divergence
    assert result.verdict == "diverged"
    assert (first.module, first.name, first.io, first.path) == (module, module, "output", "1")
    assert first.ranks == ranks


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "pp2_vpp2", "mbs1_dp2"])
def test_biases_of_clean_runs_agree(runs, layout):
    result = compare(open_run(runs.clean("single")), open_run(runs.clean(layout)))
    biases = [row for row in result.table.to_pylist() if (row["io"], row["path"]) == ("output", "1")]
    parts = {row["name"].partition("layers.")[2].partition(".")[2] for row in biases}
    assert parts == {"self_attention", "self_attention.linear_proj", "mlp", "mlp.linear_fc1", "mlp.linear_fc2"}
    assert {row["state"] for row in biases} == {"agree"}
    assert {row["kind"] for row in biases} == {"activation"}
