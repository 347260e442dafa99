"""Runs that recorded only a part: what is there is compared, what is missing has a reason and is no divergence."""

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run


def test_one_microbatch(runs):
    result = compare(open_run(runs.clean("single")), open_run(runs.partly("dp2", "second")))
    assert result.verdict == "agree", result.first_divergence
    # The mean loss of a step needs all of its microbatches.
    assert result.layout == {"only 4 of 8 samples were recorded": 1}
    assert result.counts["only_right"] == 0
    rows = [row for row in result.table.to_pylist() if row["kind"] == "gradient" and row["state"] == "agree"]
    # Microbatch 1 of two data-parallel ranks holds the samples of microbatches 2 and 3 of the single run.
    assert {row["microbatch"] for row in rows} == {2, 3}


def test_one_rank(runs):
    result = compare(open_run(runs.clean("single")), open_run(runs.partly("tp2", "rank0")))
    assert result.verdict == "agree", result.first_divergence
    assert list(result.layout) == ["1 of 2 parts"]
    table = result.table.to_pylist()
    states = {row["state"] for row in table if row["name"].endswith("linear_qkv") and row["io"] == "output"}
    assert states == {"layout"}
    states = {row["state"] for row in table if row["name"].endswith("input_layernorm")}
    assert states == {"agree"}
