"""Saved tensors in comparisons: clean layouts agree element by element, and figures are those of the elements."""

import json

import numpy as np
import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.load.saved_tensors import read_tensor
from msprobe_megatron.cli import main
from tests.jobs.compare.test_faults import _FAULTS
from tests.jobs.compare.test_matrix import _PAIRS

_QUICK = [
    *(("single", layout) for layout in ("tp2_sp", "cp2", "dp2_distopt", "mbs1_dp2", "bf16")),
    *(("moe", "ep2"), ("bf16", "bf16_tp2")),
]


def check(runs, golden, other):
    result = compare(open_run(runs.saved(golden)), open_run(runs.saved(other)))
    assert (result.verdict, result.reason) == ("agree", ""), result.first_divergence
    assert {state for state, count in result.counts.items() if count} == {"agree"}, result.layout
    rows = result.table.to_pylist()
    by_rows = {row["name"] for row in rows if np.isnan(row["cosine"]) and row["kind"] != "loss"}
    # What all experts of a rank get at once is left to statistics; all else is compared by its elements.
    assert all(name.endswith(".experts") for name in by_rows)
    assert result.tensors > 500
    assert min(row["cosine"] for row in rows if not np.isnan(row["cosine"])) > 0.9
    return result


@pytest.mark.parametrize(("golden", "other"), _QUICK)
def test_clean_runs_agree_element_by_element(runs, golden, other):
    result = check(runs, golden, other)
    if "bf16" not in other:
        weights = [row for row in result.table.to_pylist() if row["kind"] == "parameter"]
        assert weights
        assert {row["max_abs"] for row in weights} == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize(("golden", "other"), [pair for pair in _PAIRS if pair not in _QUICK])
def test_all_clean_runs_agree_element_by_element(runs, golden, other):
    check(runs, golden, other)


def test_the_figures_are_those_of_the_elements(runs):
    """A weight of both runs, read as it was saved: the single run's is whole, of the other each rank has a half."""
    golden, other = open_run(runs.saved("single")), open_run(runs.saved("bf16_tp2"))
    result = compare(golden, other)
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    row = next(r for r in result.table.to_pylist() if r["kind"] == "parameter" and r["name"] == name)
    chosen = f"kind = 'parameter' and name = '{name}'"
    whole, halves = (
        [
            read_tensor(run, 0, rank, key).numpy().astype(np.float64)
            for rank, key in run.rows().filter(chosen).order("rank").project("rank, tensor").fetchall()
        ]
        for run in (golden, other)
    )
    # A row-parallel weight is cut along its second dimension.
    x, y = whole[0], np.concatenate(halves, axis=1)
    assert row["max_abs"] == pytest.approx(np.abs(x - y).max(), rel=1e-6)
    assert row["relative_l2"] == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-3)
    assert row["cosine"] == pytest.approx((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-6)


@pytest.mark.parametrize(
    ("layout", "fault", "name", "kind"),
    [
        ("tp2", "gate_and_up", "decoder.layers.1.mlp.linear_fc1.weight", "parameter"),
        ("tp2", "flipped_last_bit", "decoder.layers.2.self_attention.linear_proj.weight", "parameter"),
        ("pp2_vpp2", "rows_swapped", "decoder.layers.1.input_layernorm", "activation"),
        ("ep2", "expert_rows_swapped", "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1", "activation"),
    ],
)
def test_what_statistics_cannot_see_is_named_exactly(runs, layout, fault, name, kind):
    golden = "moe" if layout == "ep2" else "single"
    result = compare(open_run(runs.saved(golden)), open_run(runs.saved(layout, fault)))
    assert result.verdict == "diverged"
    first = result.first_divergence
    assert (first.name, first.kind) == (name, kind)
    assert first.elements["first_at"] is not None
    if fault == "expert_rows_swapped":
        # Sample and position of a token, and the element: two tokens of 16 positions and 2 samples.
        sample, position, _ = first.elements["largest_at"]
        assert 0 <= sample < 8
        assert 0 <= position < 16
    if fault == "flipped_last_bit":
        assert first.elements["differing"] == 1
        assert first.elements["first_at"] == first.elements["largest_at"]


def test_the_command_tells_where_elements_differ(runs, capsys):
    arguments = ["compare", str(runs.saved("single")), str(runs.saved("tp2", "gate_and_up"))]
    assert main([*arguments, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["tensors"] > 500
    assert set(answer["first_divergence"]["elements"]) == {
        *("relative_l2", "max_abs", "cosine", "differing", "numel", "largest_at", "first_at"),
    }
    assert main([*arguments, "--json", "--no-tensors"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["tensors"], answer["first_divergence"]["elements"]) == (0, None)
    assert main(arguments) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "elements differ, relative L2 error" in text
    assert "compared element by element" in text


def test_a_damaged_file_of_tensors_is_told_and_rows_are_compared(runs, tmp_path):
    import shutil

    damaged = tmp_path / "damaged"
    shutil.copytree(runs.saved("tp2_sp"), damaged)
    file = damaged / "step_000000" / "rank_00001" / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    result = compare(open_run(runs.saved("single")), open_run(damaged))
    assert result.verdict == "agree"
    assert any("rank_00001" in text and "cannot be read" in text for text in result.hints)
    assert 0 < result.tensors < result.counts["agree"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", _FAULTS)
def test_faults_are_named_by_their_elements_too(runs, fault):
    layout, golden, module, name, kind, ranks, steps = _FAULTS[fault]
    if fault == "gate_and_up":  # which statistics see only in what is computed from the weight
        name, kind = "decoder.layers.1.mlp.linear_fc1.weight", "parameter"
        module = "decoder.layers.1.mlp.linear_fc1"
    golden_run, run = runs.saved(golden, steps=steps), runs.saved(layout, fault, steps=steps)
    first = compare(open_run(golden_run), open_run(run)).first_divergence
    assert (first.module, first.name, first.kind, first.ranks) == (module, name, kind, ranks)
    assert first.step == (2 if steps == 3 else 0)
