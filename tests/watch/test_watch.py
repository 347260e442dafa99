"""`watch`: what it shows is what the rows say, for a person and for a machine."""

import json

import duckdb
import numpy as np
import pytest

from msprobe_megatron.analyse.live import look
from msprobe_megatron.cli import main
from msprobe_megatron.report.terminal_watch import figure, sparkline


def query(run, text):
    files = [str(path) for path in run.glob("monitor/rank_*/steps_*.parquet")]
    return duckdb.sql(text.replace("ROWS", f"read_parquet({files})")).fetchall()


def test_curves_are_those_of_the_rows(watched):
    live = look(watched)
    assert live.steps == list(range(16))
    assert (live.world, live.ranks, live.alerts) == (2, 2, 1)
    totals = {}
    for step, path, value in query(
        watched, "select step, path, sum from ROWS where kind = 'loss' and name = 'lm loss'"
    ):
        totals.setdefault(step, {"0": 0.0, "1": 0.0})[path] += value
    assert live.losses["lm loss"] == pytest.approx([totals[step]["0"] / totals[step]["1"] for step in range(16)])
    assert live.losses["lm loss"][14] > live.losses["lm loss"][13]
    where = "kind = 'grad_reduced' and name like '%layers.2.%' and rank = 0 and step = 5"
    squares = [value for (value,) in query(watched, f"select sumsq from ROWS where {where}")]
    assert live.layers[2][5] == pytest.approx(np.sqrt(np.sum(squares)))
    assert list(live.layers) == [0, 1, 2, 3]
    assert len(live.scalars["grad_norm"]) == 16
    assert look(watched, window=4, measure="activations").steps == [12, 13, 14, 15]


def test_once(watched, capsys):
    assert main(["watch", str(watched), "--once"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "step 15, 2 of 2 ranks" in out
    assert "1 alert" in out
    assert "lm loss" in out and "layer 3" in out and "█" in out
    assert "spike: lm loss" in out


def test_json(watched, capsys):
    assert main(["watch", str(watched), "--json", "--steps", "3", "--of", "activations"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [13, 14, 15]
    assert found["measure"] == "activations"
    assert set(found["layers"]) == {"0", "1", "2", "3"}
    assert found["events"][-1]["rule"] == "spike"


def test_a_run_that_has_written_nothing_yet(tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps({"world": 4}))
    code = main(["watch", str(tmp_path), "--once"])
    out, err = capsys.readouterr()
    assert (code == 0 and "nothing watched yet" in out) or (code == 2 and "run.json" in err)


def test_what_is_no_run(tmp_path, capsys):
    assert main(["watch", str(tmp_path), "--once"]) == 2
    assert "no run.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([None], ""),
        ([1, 1], "▁▁"),
        ([0, 6.9, None, float("inf"), 8], "▁▇ !█"),
        (range(100), "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparkline(values, expected):
    line = sparkline(list(values), width=8)
    assert line == expected


def test_last_figure():
    assert figure([1.0, 123456.789, None]) == "1.2346e+05"
    assert figure([None]) == ""


def test_a_loss_that_is_not_finite_is_shown_as_such(tmp_path, capsys):
    from tests.checks.jobs import job

    out = job(tmp_path, "single", "nan_weight", at=1, probe="monitor: {activations: false}\n", steps=3)
    live = look(out)
    assert [np.isnan(value) for value in live.losses["lm loss"]] == [False, True, True]
    assert [np.isnan(value) for value in live.layers[1]] == [False, True, True]
    main(["watch", str(out), "--json"])
    assert json.loads(capsys.readouterr().out)["losses"]["lm loss"][1:] == ["nan", "nan"]
    main(["watch", str(out), "--once"])
    assert "nan" in capsys.readouterr().out
