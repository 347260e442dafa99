"""Digests and sketches in comparisons: layouts agree, and what no statistic can see is found."""

import numpy as np
import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.compare.match import match
from msprobe_megatron.analysis.load.run import open_run

_PAIRS = [
    *(("single", layout) for layout in ("tp2", "tp2_sp", "cp2", "pp2_vpp2", "dp2_distopt")),
    *(("qk_norm", "qk_norm_tp2_sp"), ("fp16", "fp16_tp2")),
    *(("moe", "ep2"), ("bf16", "bf16_tp2"), ("tp2_sp", "cp2")),
]


@pytest.mark.parametrize(("golden", "other"), _PAIRS)
def test_clean_runs_agree_element_by_element(runs, golden, other):
    left, right = open_run(runs.sketched(golden)), open_run(runs.sketched(other))
    result = compare(left, right)
    assert (result.verdict, result.reason) == ("agree", ""), result.first_divergence
    pairs = match(left, right)
    estimated = np.isfinite(pairs["distance"])
    # Tokens at an expert have no fixed place, and the loss is no tensor; all else is compared by its elements.
    assert estimated.sum() > (0.6 if golden == "moe" else 0.9) * len(pairs)
    weights = pairs["kind"] == "parameter"
    assert (pairs["digest_l"][weights] == pairs["digest_r"][weights]).all()


def test_the_distance_is_that_of_the_elements(runs):
    """The same weights in bf16: the distance of each follows from rounding them, which NumPy does as well."""
    left, right = open_run(runs.sketched("single")), open_run(runs.sketched("bf16"))
    pairs = match(left, right)
    matrices = np.flatnonzero((pairs["kind"] == "parameter") & (pairs["numel_l"] >= 1024))
    relative = pairs["distance"][matrices] / np.sqrt(pairs["sumsq_l"][matrices])
    values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    bits = (values.view(np.uint32) + 0x8000) & np.uint32(0xFFFF0000)
    expected = np.linalg.norm(bits.view(np.float32) - values) / np.linalg.norm(values)
    assert np.median(relative) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("layout", "golden", "fault", "name", "kind"),
    [
        ("tp2", "single", "gate_and_up", "decoder.layers.1.mlp.linear_fc1.weight", "parameter"),
        ("tp2", "single", "flipped_last_bit", "decoder.layers.2.self_attention.linear_proj.weight", "parameter"),
        ("pp2_vpp2", "single", "rows_swapped", "decoder.layers.1.input_layernorm", "activation"),
    ],
)
def test_what_statistics_cannot_see_is_named_exactly(runs, layout, golden, fault, name, kind):
    result = compare(open_run(runs.sketched(golden)), open_run(runs.sketched(layout, fault)))
    assert result.verdict == "diverged"
    assert (result.first_divergence.name, result.first_divergence.kind) == (name, kind)
    figures = {row["name"]: row for row in result.table.to_pylist() if row["kind"] == kind and row["io"] != "input"}
    row = figures[name]
    assert row["sumsq_golden"] == pytest.approx(row["sumsq_run"], rel=1e-6)
    assert row["sum_golden"] == pytest.approx(row["sum_run"], rel=1e-4, abs=1e-4)
