"""Speed, memory and scaling of runs, against a computation of its own from the very rows."""

import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.diagnose.throughput import WARM_UP, layout_text, scaling, throughput
from msprobe_megatron.analysis.load.run import RunError, open_run
from msprobe_megatron.analysis.page.page_data import page_data
from msprobe_megatron.lab.bench.tables.scaling import run_job
from msprobe_megatron.report.terminal.scaling import plot


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaling")
    return [run_job(folder / name, count, steps=8) for name, count in (("one", 1), ("two", 2))]


def rows_of(run):
    return [row for path in run.glob("monitor/rank_*/*.parquet") for row in pq.read_table(path).to_pylist()]


def test_numbers_are_those_of_the_rows(runs):
    found = throughput(open_run(runs[1]))
    rows = [row for row in rows_of(runs[1]) if row["kind"] == "throughput" and row["step"] >= WARM_UP]
    times = {
        rank: np.median([r["sum"] for r in rows if r["rank"] == rank and r["name"] == "interval_seconds"])
        for rank in (0, 1)
    }
    slowest = max(times, key=times.get)
    assert found.slowest_rank == slowest
    assert found.iterations_per_second == pytest.approx(1 / times[slowest])
    # Micro-batch 1, two microbatches, two data-parallel ranks.
    assert (found.local_batch, found.global_batch, found.cards, found.layout) == (2, 4, 2, "DP2")
    assert found.samples_per_second == pytest.approx(4 / times[slowest])
    assert found.tokens_per_second == pytest.approx(4 * 128 / times[slowest])
    assert found.memory_bytes == max(r["sum"] for r in rows if r["name"] == "host_bytes")


def test_time_and_memory_of_every_rank_are_on_the_page(runs):
    grid = page_data(open_run(runs[1]))["ranks"]
    rows = [row for row in rows_of(runs[1]) if row["kind"] == "throughput"]
    for rank in (0, 1):
        here = [row for row in rows if row["rank"] == rank]
        seconds = np.median([row["sum"] for row in here if row["name"] == "interval_seconds"])
        assert grid[rank]["seconds"] == pytest.approx(seconds, rel=1e-5)
        assert grid[rank]["memory"] == max(row["sum"] for row in here if row["name"] == "host_bytes")


def test_speed_up_and_efficiency(runs):
    one, two = scaling([open_run(runs[1]), open_run(runs[0])])
    assert (one.cards, two.cards) == (1, 2)
    assert (one.speedup, one.efficiency) == (1.0, 1.0)
    assert two.speedup == pytest.approx(two.samples_per_second / one.samples_per_second)
    assert two.efficiency == pytest.approx(two.speedup / 2)
    assert plot([one, two]).count("<circle") == 2


def test_time_to_a_loss(runs):
    rows = [row for row in rows_of(runs[0]) if row["kind"] == "loss" and row["name"] == "lm loss"]
    means = []
    for step in sorted({row["step"] for row in rows}):
        here = [row for row in rows if row["step"] == step]
        total, count = (sum(row["sum"] for row in here if row["path"] == path) for path in "01")
        means.append(total / count)
    target = means[3]
    at = next(step for step, mean in enumerate(means) if mean <= target)
    found = throughput(open_run(runs[0]), target_loss=target + 1e-9)
    assert found.last_loss == pytest.approx(means[-1])
    assert found.seconds_to_loss == pytest.approx((at + 1) * found.seconds)
    assert throughput(open_run(runs[0]), target_loss=0.0).seconds_to_loss is None


def test_command(runs, tmp_path):
    command = [
        sys.executable,
        "-m",
        "msprobe_megatron.cli",
        "scaling",
        *map(str, runs),
        "--json",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert [line["cards"] for line in json.loads(done.stdout)["results"]] == [1, 2]
    assert (tmp_path / "scaling_runs.svg").read_text().startswith("<svg")


def test_a_run_without_throughput_says_what_to_write(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "world": 1, "sizes": {}, "ranks": []}))
    with pytest.raises(RunError, match="add monitor"):
        throughput(open_run(tmp_path))


def test_layout_in_words():
    assert layout_text({"tp": 2, "pp": 1, "dp": 4, "edp": 4}) == "TP2 DP4"
    assert layout_text({"tp": 1}) == "single"
