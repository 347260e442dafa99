"""API calls across layouts: nearly all are compared, clean runs agree, and a fault inside a module is named there."""

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run

_PAIRS = [("single", "tp2"), ("moe", "ep2")]
_MORE_PAIRS = [
    *(("single", layout) for layout in ("tp2_sp", "pp2", "cp2", "dp2", "tp2_pp2")),
    *(("rope", "rope_cp2"), ("qk_norm", "qk_norm_tp2_sp"), ("bf16", "bf16_tp2"), ("moe", "tp2_ep2")),
    *(("tp2", "cp2"), ("tp2_sp", "tp2"), ("tp2", "tp2_pp2"), ("dp2", "cp2")),
]


def _calls(result):
    rows = [row for row in result.table.to_pylist() if "/" in row["name"]]
    return [row for row in rows if not row["state"].startswith("only")]


@pytest.mark.parametrize(
    ("golden", "other"), [*_PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in _MORE_PAIRS)]
)
def test_calls_of_clean_runs_are_compared_and_agree(runs, golden, other):
    result = compare(open_run(runs.called(golden)), open_run(runs.called(other)))
    assert (result.verdict, result.first_divergence) == ("agree", None)
    calls = _calls(result)
    compared = [row for row in calls if row["state"] == "agree"]
    assert len(calls) > 1000
    assert len(compared) >= 0.9 * len(calls), result.layout
    # Whatever is left out says why.
    assert all(row["reason"].startswith("API call: ") for row in calls if row["state"] == "layout")


# fault -> (golden, layout, name of the call, io)
_ATTENTION = "decoder.layers.1.self_attention.core_attention"
_FAULTS = {
    "attention_scale": ("single", "tp2", f"{_ATTENTION}/torch.baddbmm.0", "output"),
    "no_mask": ("single", "tp2", f"{_ATTENTION}.scale_mask_softmax/torch.Tensor.masked_fill_.0", "input"),
    "norm_eps": ("single", "tp2", "decoder.layers.0.input_layernorm/torch.nn.functional.rms_norm.0", "output"),
    "gate_and_up": ("single", "tp2", "decoder.layers.1.mlp/torch.nn.functional.silu.0", "input"),
    "rotary_without_offset": ("rope", "rope_cp2", "rotary_pos_emb", "output"),
}
_SLOW = ("gate_and_up", "rotary_without_offset")


@pytest.mark.parametrize("fault", [pytest.param(f, marks=pytest.mark.slow) if f in _SLOW else f for f in _FAULTS])
def test_a_fault_inside_a_module_is_named_at_its_call(runs, fault):
    golden, layout, name, io = _FAULTS[fault]
    result = compare(open_run(runs.called(golden)), open_run(runs.called(layout, fault)))
    assert result.verdict == "diverged"
    first = result.first_divergence
    assert (first.name, first.io, first.kind, first.state) == (name, io, "activation", "diverged")
    assert first.error > first.tolerance
    # Nothing before it differs: calls of the layers before agree, also where all ranks hold the same.
    order = result.table.to_pylist()
    at = next(i for i, row in enumerate(order) if row["name"] == name and row["state"] == "diverged")
    assert {row["state"] for row in order[:at]} <= {"agree", "layout", "only_left", "only_right"}
    if "/" in name:
        assert first.module == (name if io == "output" else name.partition("/")[0])


def test_unreduced_outputs_are_compared_by_their_sum(runs):
    """The ranks of TP hold summands of the output of fc2 until they are reduced."""
    result = compare(open_run(runs.called("single")), open_run(runs.called("tp2")))
    rows = [
        row
        for row in _calls(result)
        if "linear_fc2/" in row["name"] and ".LinearWith" in row["name"] and row["io"] == "output"
    ]
    outputs = [row for row in rows if row["kind"] == "activation"]
    assert len(outputs) == 8
    assert all(row["state"] == "agree" for row in outputs)
    assert all(row["numel_run"] == 2 * row["numel_golden"] for row in outputs)
