"""Runs that were watched, read again: as rows, as a summary, and as the CSV files of msprobe's monitor."""

import csv
import json
import shutil
import subprocess
import sys

import pytest

from msprobe_megatron.analysis.load.run import RunError, open_run
from msprobe_megatron.report.msprobe.monitor_csv import COLUMNS, COLUMNS_BY_MICROBATCH
from tests.unit.job.features.monitor.conftest import rows_of


def cli(*argv):
    return subprocess.run(
        [sys.executable, "-m", "msprobe_megatron.cli", *map(str, argv)], capture_output=True, text=True, timeout=120
    )


def test_steps_ranks_and_rows(watched):
    out, ranks = watched.job("dp4")
    run = open_run(out)
    assert run.steps == [0, 1, 2] and {rank for _, rank, _ in run.files} == set(range(len(ranks)))
    assert run.problems == []
    one = len(rows_of(out, 0, 1))
    assert run.rows(step=1).filter("rank = 0").aggregate("count(*)").fetchall() == [(one,)]
    assert run.monitor_rows().aggregate("count(distinct step)").fetchall() == [(3,)]
    with pytest.raises(RunError, match="no rows of step 7"):
        run.rows(step=7)


def test_the_trend_viewer_gets_every_kind(watched, tmp_path):
    import sqlite3

    out, _ = watched.job("ep2")
    assert cli("export", out, "--format", "trend-db", "--out", tmp_path / "run.trend.db").returncode == 0
    database = sqlite3.connect(tmp_path / "run.trend.db")
    names = {name for (name,) in database.execute("select metric_name from monitoring_metrics")}
    assert {"forward", "backward", "parameters", "parameters_grad", "grad_unreduced", "optimizer_state"} <= names
    assert {"grad_clipped", "update", "loss", "scalar", "throughput"} <= names


def test_a_damaged_file_is_told_and_left_out(watched, tmp_path):
    out, _ = watched.job("dp4")
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    file = next((copy / "monitor/rank_00002").glob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-9])
    run = open_run(copy)
    assert [problem for problem in run.problems if "rank_00002" in problem and "not a whole Parquet file" in problem]
    assert {part.rank for part in run.monitor} == {0, 1, 3}


@pytest.mark.parametrize("command", [("summary",), ("diagnose",), ("export", "--format", "trend-db")])
def test_commands_take_a_run_that_was_only_watched(watched, tmp_path, command):
    out, _ = watched.job("ep2")
    name, *options = command
    extra = ["--out", tmp_path / "x.db"] if options else []
    done = cli(name, out, *options, *extra)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tables(watched, tmp_path_factory):
    out, _ = watched.job("tp2")
    folder = tmp_path_factory.mktemp("csv") / "monitor_output"
    done = cli("export", out, "--format", "monitor-csv", "--out", folder, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] > 100
    return out, folder


def test_csv_files_have_the_names_and_columns_of_msprobe(tables):
    out, folder = tables
    (rank0,) = folder.glob("*-rank0-*")
    names = {path.name for path in rank0.iterdir()}
    assert names == {
        *("actv_0-2.csv", "actv_grad_0-2.csv", "grad_reduced_0-2.csv", "exp_avg_0-2.csv", "exp_avg_sq_0-2.csv"),
        *("param_origin_0-2.csv", "param_updated_0-2.csv", "other_1-2.csv"),
    }
    for name in names:
        header = (rank0 / name).read_text().splitlines()[0].split(",")
        assert tuple(header) == (COLUMNS_BY_MICROBATCH if name.startswith("actv") else COLUMNS)


def test_csv_values_are_those_of_the_rows(tables):
    out, folder = tables
    with next(folder.glob("*-rank1-*/grad_reduced_0-2.csv")).open() as file:
        lines = list(csv.DictReader(file))
    rows = {(r["name"], r["step"]): r for r in rows_of(out, 1) if r["kind"] == "grad_reduced"}
    assert len(lines) == len(rows)
    for line in lines:
        row = rows[line["name"], int(line["step"])]
        assert float(line["norm"]) == pytest.approx(row["sumsq"] ** 0.5)
        assert float(line["mean"]) == pytest.approx(row["sum"] / row["numel"])
        assert float(line["min"]) == row["min"] and int(line["nans"]) == 0
        assert line["shape"] == str(row["shape"]) and line["dtype"] == "torch.float32"
    with next(folder.glob("*-rank1-*/actv_0-2.csv")).open() as file:
        found = {(line["name"], line["micro_step"]) for line in csv.DictReader(file)}
    assert {("decoder.layers.0.input.hidden_states", str(n)) for n in range(8)} <= found
