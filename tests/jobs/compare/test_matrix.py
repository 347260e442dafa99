"""Clean runs of every layout agree with the single run and with each other: no false alarm."""

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run

_PAIRS = [
    *(("single", layout) for layout in ("tp2", "tp2_sp", "pp2", "pp2_vpp2", "pp2_uneven", "tp2_pp2", "cp2")),
    *(("single", layout) for layout in ("dp2", "dp2_distopt", "recompute", "pp2_recompute", "mbs1", "mbs1_dp2")),
    *(("single", layout) for layout in ("single", "bf16")),
    *(("moe", layout) for layout in ("ep2", "tp2_ep2")),
    *(("rope", "rope_cp2"), ("bf16", "bf16_tp2"), ("fp16", "fp16_tp2"), ("qk_norm", "qk_norm_tp2_sp")),
    *(("tp2", "cp2"), ("tp2_pp2", "dp2_distopt"), ("mbs1_dp2", "pp2_vpp2"), ("pp2_recompute", "tp2_sp")),
    *(("ep2", "tp2_ep2"), ("recompute", "pp2_recompute"), ("cp2", "mbs1")),
]


@pytest.mark.parametrize(("golden", "other"), _PAIRS)
def test_clean_runs_agree(runs, golden, other):
    result = compare(open_run(runs.clean(golden)), open_run(runs.clean(other)))
    assert (result.verdict, result.reason) == ("agree", ""), result.first_divergence
    assert result.steps == [0, 2]
    states = {state for state, count in result.counts.items() if count}
    assert states == {"agree"}, result.layout
    assert result.replicas == []
    # Every kind of tensor was compared, the mean loss too: an empty comparison would agree as well.
    kinds = set(result.table.column("kind").to_pylist())
    assert kinds == {"activation", "gradient", "parameter", "grad_reduced", "loss"}
    assert result.counts["agree"] > 2000


def test_other_data_are_told_from_another_computation(runs):
    result = compare(open_run(runs.clean("single")), open_run(runs.faulty("single", "other_data")))
    assert result.verdict == "incomparable"
    assert "DATA differ" in result.reason
    assert "input_ids" in result.reason


def test_other_shapes_are_another_model(runs):
    result = compare(open_run(runs.clean("single")), open_run(runs.clean("wider")))
    assert result.verdict == "incomparable"
    assert "ffn_hidden_size is 64 and 128" in result.reason


def test_no_common_step(runs):
    result = compare(open_run(runs.clean("single")), open_run(runs.clean("tp2")), step=1)
    assert result.verdict == "incomparable"
    assert "step 1 was not recorded by both" in result.reason
    assert "[0, 2]" in result.reason


def test_a_repeated_run_raises_the_tolerance(runs):
    """The distance of a bf16 run, taken for noise, hides the same distance elsewhere."""
    golden, other, noise = (open_run(runs.clean(name)) for name in ("single", "bf16", "bf16_tp2"))
    plain, raised = compare(golden, other, 0), compare(golden, other, 0, noise)
    before, after = (table.column("tolerance").to_numpy() for table in (plain.table, raised.table))
    assert (after >= before).all()
    assert (after > before).any()
