"""A run that monitors every step and dumps one: readers see all steps; alerts and orders are no gaps of the record."""

import json
import shutil

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.diagnose.diagnose import diagnose
from msprobe_megatron.analysis.diagnose.summary import summarise, warnings
from msprobe_megatron.analysis.load.live import look
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.cli import main
from tests.support.demo_runs import demo_run

FLAGS = "--num-layers 2 --train-iters 8 --micro-batch-size 2 --global-batch-size 4"
PROBE = "steps: [{}]\ndump: {{level: L0}}\nmonitor: {{parameters: true}}\n"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two runs of one job that dump different steps."""
    folder = tmp_path_factory.mktemp("both")
    return [demo_run(folder, PROBE.format(step), FLAGS, name=f"step{step}") for step in (2, 5)]


def test_every_monitored_step_is_read(pair, tmp_path):
    run = open_run(pair[0])
    assert (run.steps, run.dumped_steps) == (list(range(8)), [2])
    assert summarise(run).steps == list(range(8))
    kinds = "kind, name, io, path, step, microbatch, phase, rank, vpp, seq"
    rows = run.rows().project(kinds)
    assert len(rows) == len(rows.distinct())
    dumped = run.rows(step=2)
    assert len(dumped.filter("kind = 'activation'")) > 50 and len(dumped.filter("kind = 'scalar'")) > 0
    assert main(["export", str(pair[0]), "--format", "csv", "--out", str(tmp_path / "rows.csv")]) == 0
    steps = {line.split(",")[0] for line in (tmp_path / "rows.csv").read_text().splitlines()[1:]}
    assert len(steps) == 8


def test_runs_that_dumped_different_steps_are_compared(pair):
    result = compare(open_run(pair[0]), open_run(pair[1]))
    assert (result.verdict, result.steps) == ("agree", list(range(8))), result.as_dict()
    assert result.counts["agree"] > 50


def test_watch_shows_every_step_however_many_files_hold_them(pair, tmp_path):
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    copy = tmp_path / "copy"
    shutil.copytree(pair[0], copy)
    for file in list(copy.glob("monitor/rank_*/*.parquet")):
        table = pq.read_table(file)
        for step in sorted(set(table["step"].to_pylist())):
            part = table.filter(pc.equal(table["step"], step))
            pq.write_table(part, file.parent / f"steps_{step:09d}_{step:09d}.parquet")
        file.unlink()
    assert look(copy, 60).steps == list(range(8))
    assert look(copy, 3).steps == [5, 6, 7]


def test_alerts_of_a_second_rank_and_orders_are_no_gaps(pair, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(pair[0], copy)
    where = {"step": 3, "kind": "loss", "name": "lm loss", "io": "", "path": "", "microbatch": 0, "phase": "forward"}
    alert = {"event": "alert", "rule": "spike", **where}
    events = [
        {**alert, "rank": 0, "text": "spike: lm loss: 9.1"},
        {**alert, "rank": 1, "text": "spike: lm loss: 9.2"},
        {"event": "control", "rank": 0, "step": 4, "text": "from step 4: steps 5-6"},
    ]
    (copy / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = diagnose(open_run(copy)).findings
    assert [finding.what for finding in found] == ["alert"]
    assert "ranks [0, 1]" in found[0].text
    failed = {**events[-1], "text": "control.json: no order; nothing changes"}
    (copy / "events.jsonl").write_text(json.dumps(failed) + "\n")
    assert any("nothing changes" in text for text in warnings(open_run(copy)))
