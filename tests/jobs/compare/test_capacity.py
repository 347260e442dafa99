"""Capacity of experts: layouts that drop the same tokens agree, others are told why they cannot be compared."""

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run


def test_expert_parallel_runs_drop_the_same_tokens(runs):
    result = compare(open_run(runs.faulty("capacity", "none")), open_run(runs.faulty("capacity_ep2", "none")))
    assert (result.verdict, result.hints) == ("agree", [])


def test_no_router_is_blamed_for_the_capacity_of_a_rank(runs):
    result = compare(open_run(runs.faulty("capacity", "none")), open_run(runs.faulty("capacity_tp2", "none")))
    assert result.verdict == "incomparable"
    assert "decoder.layers.0.mlp.router on the runs drop different tokens" in result.reason
    assert not any("drop different tokens" in text for text in result.hints)


def test_faults_before_the_router_are_found(runs):
    result = compare(open_run(runs.faulty("capacity", "none")), open_run(runs.faulty("capacity_tp2", "norm_eps")))
    assert result.verdict == "diverged"
    assert result.first_divergence.module == "decoder.layers.0.input_layernorm"
    assert any("drop different tokens" in text for text in result.hints)
