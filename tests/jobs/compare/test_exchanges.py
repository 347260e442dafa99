"""Communication put together from what the ranks wrote: nobody is missed, clean jobs fit, a changed value is named."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.diagnose.exchanges import exchanges, totals
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.page.trends import communication
from tests.support.demo_runs import demo_run

MICROBATCHES = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """TP2 x PP2 over four processes, two microbatches, recorded at mix."""
    flags = (
        f"--num-layers 4 --micro-batch-size 2 --train-iters 1 --global-batch-size {2 * MICROBATCHES}"
        " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    )
    return demo_run(tmp_path_factory.mktemp("exchanges"), "steps: [0]\ndump: {level: mix}\n", flags, world=4)


def comm_rows(run):
    return [
        {**row, "extra": json.loads(row["extra"])}
        for path in run.glob("step_000000/rank_*/records.parquet")
        for row in pq.read_table(path).to_pylist()
        if row["kind"] == "comm"
    ]


def test_every_message_has_both_ends_and_everything_fits(run):
    found = exchanges(open_run(run), 0)
    rows = comm_rows(run)
    sends = [x for x in found if x.op == "send"]
    # Each of the two tensor-parallel pairs: one activation forward and one gradient back a microbatch.
    assert len(sends) == 2 * 2 * MICROBATCHES
    assert len(sends) == sum(row["extra"]["op"] == "send" for row in rows)
    for message in sends:
        sender, receiver = message.ranks
        assert message.inputs[sender] == message.outputs[receiver]
    reduced = [x for x in found if x.op == "all_reduce"]
    calls = sum(row["extra"]["op"] == "all_reduce" and row["io"] == "input" for row in rows)
    assert sum(len(x.seq) for x in reduced) == calls
    for x in reduced:
        assert sorted(x.seq) == x.ranks
        if x.module.startswith("decoder."):  # those of the loss are also maxima
            total = np.sum([figures[0] for figures in x.inputs.values()])
            assert x.outputs[x.ranks[0]][0] == pytest.approx(total, rel=1e-3, abs=1e-3)
    assert [x.finding for x in found if x.finding] == []
    assert sum(entry["calls"] for entry in totals(found)) == len(found)


def test_no_row_of_a_buffer_before_it_was_received(run):
    names = {
        (row["kind"], row["io"])
        for path in run.glob("step_000000/rank_*/records.parquet")
        for row in pq.read_table(path).to_pylist()
        if "recv" in row["name"]
    }
    assert names == {("comm", "output")}


@pytest.mark.parametrize("op", ["recv", "all_reduce"])
def test_a_changed_value_is_named(run, tmp_path, op):
    copy = tmp_path / "out"
    shutil.copytree(run, copy)
    path = copy / "step_000000/rank_00002/records.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    at = next(
        i
        for i, r in enumerate(rows)
        if r["kind"] == "comm" and json.loads(r["extra"])["op"] == op and r["io"] == "output"
    )
    rows[at]["sumsq"] *= 1.01
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    (wrong,) = [x for x in exchanges(open_run(copy), 0) if x.finding]
    assert 2 in wrong.ranks
    assert "rank 2" in wrong.finding
    shown = communication(open_run(copy), [0])
    assert (shown["wrong"], shown["first"][0]["finding"]) == (1, wrong.finding)


def test_a_run_without_communication_is_empty(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "world": 1, "sizes": {}, "ranks": []}))
    assert exchanges(open_run(tmp_path), 0) == []
    assert communication(open_run(tmp_path), [0])["count"] == 0
