"""Non-finite values that reached the loss or a gradient come before those that did not; a mask is neither.

Rows of a clean run are rewritten as if they had held such values: what is told is what was planted.
"""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.diagnose.diagnose import diagnose
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.page.findings import verdict_of
from msprobe_megatron.analysis.page.table import open_view
from msprobe_megatron.cli import main

INSIDE = ("activation", "decoder.layers.1.mlp.linear_fc1", "input")
ORIGIN = ("activation", "decoder.layers.2.pre_mlp_layernorm", "output")
ALWAYS = lambda row: True  # noqa: E731


@pytest.fixture
def planted(runs, tmp_path):
    """Makes a copy of a clean run in which chosen rows hold chosen counts of non-finite values."""

    def plant(*plants):
        copy = tmp_path / "copy"
        shutil.copytree(runs.clean("single"), copy)
        left = list(plants)
        for path in sorted(copy.glob("step_*/rank_*/records.parquet")):
            table = pq.read_table(path)
            rows = table.to_pylist()
            for row in rows:
                for plant in plants:
                    place, counts, more = plant
                    if (row["kind"], row["name"], row["io"])[: len(place)] == place and more(row):
                        row.update(counts)
                        left = [other for other in left if other is not plant]
            pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
        assert not left, "nothing was planted"
        return copy

    return plant


def in_step(number):
    return lambda row: row["step"] == number


NAN = {"n_nan": 1}
LOSS = ("loss", "lm loss")


def test_a_value_that_nothing_used_is_a_note(planted, capsys):
    path = planted((INSIDE, NAN, ALWAYS))
    found = diagnose(open_run(path))
    assert found.findings == []
    (note,) = found.notes
    assert (note.what, note.where["name"]) == ("unused_non_finite", INSIDE[1])
    assert "reached neither the loss nor a gradient" in note.text
    assert main(["diagnose", str(path)]) == 0
    said = capsys.readouterr().out
    assert "loss and gradients finite" in said
    assert "all values finite" not in said


@pytest.mark.parametrize("sink", [("loss", "lm loss"), ("grad_reduced",), ("loss", "grad_norm")])
def test_what_reached_the_loss_or_a_gradient_comes_first(planted, sink):
    # The same harmless NaN in every step, before the one that matters in the order of the computation.
    path = planted((INSIDE, NAN, ALWAYS), (ORIGIN, NAN, in_step(2)), (sink, NAN, in_step(2)))
    found = diagnose(open_run(path))
    assert found.findings[0].what == "non_finite"
    assert (found.findings[0].where["name"], found.findings[0].where["step"]) == (ORIGIN[1], 2)
    assert INSIDE[1] in found.notes[0].where["names"]


def test_in_a_single_step_the_one_that_left_its_module_comes_first(planted):
    # linear_fc1's input is inside of mlp, whose output is finite; the norm's output went on to the loss.
    onwards = ("activation", "decoder.layers.2", "output")
    path = planted((INSIDE, NAN, ALWAYS), (ORIGIN, NAN, ALWAYS), (onwards, NAN, ALWAYS), (LOSS, NAN, ALWAYS))
    found = diagnose(open_run(path), 0)
    assert found.findings[0].where["name"] == ORIGIN[1]


def test_a_value_that_may_have_reached_a_gradient_is_not_passed_over(planted):
    # All gradients of the step are finite, the update of a weight is not.
    path = planted((INSIDE, NAN, ALWAYS), (("parameter", "decoder.final_layernorm.weight"), NAN, ALWAYS))
    names = [finding.where.get("name") for finding in diagnose(open_run(path)).findings]
    assert names[0] == "decoder.final_layernorm.weight"


SQUARE = {"global_shape": [2, 8, 8], "shape": [2, 8, 8], "numel": 128, "n_neginf": 2 * 28, "n_zero": 0}
MASKS = {
    "by its name": {"path": "attention_mask", "n_neginf": 3},
    "zero elsewhere": {"numel": 64, "n_zero": 40, "n_neginf": 24},
    "a triangle, as ALiBi's": SQUARE,
}
NO_MASKS = {
    "with a NaN": {**SQUARE, "n_nan": 1},
    "not a triangle": {**SQUARE, "n_neginf": 57},
    "+Inf": {**SQUARE, "n_neginf": 0, "n_posinf": 56},
}


@pytest.mark.parametrize("name", MASKS)
def test_minus_infinity_of_a_mask_is_a_mask(planted, name):
    found = diagnose(open_run(planted((INSIDE, MASKS[name], ALWAYS))))
    assert (found.findings, found.notes) == ([], [])


@pytest.mark.parametrize("name", NO_MASKS)
def test_what_is_no_mask_is_told(planted, name):
    path = planted((INSIDE, NO_MASKS[name], ALWAYS), (LOSS, NAN, ALWAYS))
    assert diagnose(open_run(path)).findings[0].where["name"] == INSIDE[1]


def test_the_page_says_the_same(planted):
    run = open_run(planted((INSIDE, NAN, ALWAYS)))
    verdict = verdict_of(open_view(run), {"total": 0}, [])
    assert verdict.tone == "good"
    assert [finding.title for finding in verdict.findings if finding.tone == "note"] == [
        "Non-finite values that nothing used"
    ]
