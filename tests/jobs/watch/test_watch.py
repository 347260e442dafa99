"""`watch`: what it shows is what the rows say, for a person and for a machine."""

import json

import duckdb
import numpy as np
import pytest

from msprobe_megatron.analysis.load.live import look
from msprobe_megatron.cli import main
from msprobe_megatron.job.messages import last_line
from msprobe_megatron.report.terminal.watch import figure, sparkline


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
    assert code == 2 and "no monitored step yet" in out and not err


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
    from tests.unit.job.features.checks.jobs import job

    out = job(tmp_path, "single", "nan_weight", at=1, probe="monitor: {activations: false}\n", steps=3)
    live = look(out)
    assert [np.isnan(value) for value in live.losses["lm loss"]] == [False, True, True]
    assert [np.isnan(value) for value in live.layers[1]] == [False, True, True]
    main(["watch", str(out), "--json"])
    assert json.loads(capsys.readouterr().out)["losses"]["lm loss"][1:] == ["nan", "nan"]
    main(["watch", str(out), "--once"])
    assert "nan" in capsys.readouterr().out


def test_events_of_one_step_are_in_order_of_cause_and_said_once(tmp_path, capsys):
    """Ranks write as they find: the second stage, which the NaN reached, before the first, which made it."""
    ranks = [{"rank": rank, "pp": rank // 2, "pp_size": 2} for rank in range(4)]
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "world": 4, "ranks": ranks}))
    alert = {"event": "alert", "rule": "nonfinite", "step": 7, "microbatch": 1, "io": "output", "path": ""}
    forward, backward = {"phase": "forward", "kind": "activation"}, {"phase": "backward", "kind": "gradient"}
    events = [
        {"event": "fault", "rank": 1, "step": 3, "text": "a fault"},
        {**alert, **backward, "rank": 0, "seq": 90, "name": "a", "text": "the last"},
        {"event": "recorder", "rank": 2, "step": 7, "steps": [6, 7], "text": "recorder of one"},
        {**alert, **forward, "rank": 2, "seq": 5, "name": "c", "text": "the third"},
        {**alert, **forward, "rank": 1, "seq": 60, "name": "b", "text": "the second"},
        {**alert, **forward, "rank": 0, "seq": 60, "name": "b", "text": "the second"},
        {**alert, **forward, "rank": 0, "seq": 50, "name": "a", "text": "the first"},
        {"event": "recorder", "rank": 0, "step": 7, "steps": [6, 7], "text": "recorder of another"},
        {**alert, "step": [9], "rank": [1], "name": {}, "text": "what nobody wrote"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["watch", str(tmp_path), "--once"]) == 1
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("!")]
    assert [line[2:].strip() for line in lines] == [
        "rank 1: a fault",
        "rank 0: the first",
        "ranks [0, 1]: the second",
        "rank 2: the third",
        "rank 0: the last",
        "ranks [0, 2]: recorder of another",
        "rank [1]: what nobody wrote",
    ]
    assert "msprobe-megatron diagnose" in out


@pytest.mark.parametrize(("alerts", "words"), [(0, "summary"), (1, "1 alert;"), (3, "3 alerts;")])
def test_the_last_line_of_a_job_names_the_command_that_helps(tmp_path, alerts, words):
    events = [{"event": "recorder"}, *[{"event": "alert"}] * alerts]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    line = last_line(12, tmp_path)
    assert line.startswith("12 steps recorded") and words in line
    assert ("msprobe-megatron diagnose" in line) == bool(alerts)


def test_it_says_when_the_job_has_ended(watched, tmp_path, capsys):
    import shutil

    assert look(watched).ended
    main(["watch", str(watched), "--once"])
    assert "the job has ended" in " ".join(capsys.readouterr().out.split())
    running = tmp_path / "running"
    shutil.copytree(watched, running)
    facts = json.loads((running / "ranks/rank_00001.json").read_text())
    (running / "ranks/rank_00001.json").write_text(json.dumps({**facts, "closed": False}))
    assert not look(running).ended
    main(["watch", str(running), "--once"])
    assert "ended" not in capsys.readouterr().out


def test_on_a_terminal_it_waits_for_the_run_and_ends_with_the_job(watched, tmp_path):
    """In a terminal of its own: nothing is there, then the run appears; the last view stays."""
    import os
    import pty
    import shutil
    import subprocess
    import sys

    main_end, its_end = pty.openpty()
    words = [sys.executable, "-m", "msprobe_megatron", "watch", "late", "--every", "0.2"]
    job = subprocess.Popen(words, cwd=tmp_path, stdin=its_end, stdout=its_end, stderr=subprocess.PIPE, text=True)
    os.close(its_end)
    assert "waiting for " in job.stderr.readline()
    shutil.copytree(watched, tmp_path / "coming")
    (tmp_path / "coming").rename(tmp_path / "late")
    shown = b""
    while True:
        try:
            part = os.read(main_end, 65536)
        except OSError:  # what Linux says when the other end is closed
            break
        if not part:
            break
        shown += part
    assert job.wait(timeout=120) == 1
    os.close(main_end)
    assert b"the job has ended" in shown and b"lm loss" in shown


def test_a_trace_has_the_seconds_of_every_step_and_rank(watched, tmp_path, capsys):
    assert main(["export", str(watched), "--format", "trace", "--out", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["name"]) for event in steps} == {(r, f"step {n}") for r in (0, 1) for n in range(16)}
    seconds = query(watched, "select rank, step, sum from ROWS where kind = 'throughput' and name = 'seconds'")
    lasted = {(event["pid"], int(event["name"][5:])): event["dur"] / 1e6 for event in steps}
    assert lasted == {(rank, step): pytest.approx(value, abs=1e-9) for rank, step, value in seconds}
    for rank in (0, 1):
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in steps if event["pid"] == rank]
        assert spans == sorted(spans) and all(b[0] >= a[1] - 1 for a, b in zip(spans, spans[1:], strict=False))
    alerts = [event for event in events if event["ph"] == "i" and event["name"] == "alert"]
    assert len(alerts) == 1 and "lm loss" in alerts[0]["args"]["text"]
    losses = [event["args"]["loss"] for event in events if event["ph"] == "C" and event["name"] == "lm loss"]
    assert losses == pytest.approx(look(watched).losses["lm loss"])
