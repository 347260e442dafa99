"""The last steps before something went wrong are on disk, and nothing is when nothing went wrong."""

import json
import multiprocessing
import signal

import pytest

from msprobe_megatron.analysis.diagnose.diagnose import diagnose
from msprobe_megatron.analysis.diagnose.summary import summarise
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.run_directory.directory import read_events
from tests.support.forked import prepare
from tests.unit.job.features.recorder.jobs import hang, job


def recorder_events(out):
    return [event for event in read_events(out) if event["event"] == "recorder"]


@pytest.mark.parametrize("layout", ["tp2", "pp2", pytest.param("dp2", marks=pytest.mark.slow)])
def test_nan_on_one_rank_at_step_7_leaves_steps_4_to_7_of_all_ranks(layout, tmp_path):
    out = job(tmp_path, layout, "nan")
    run = open_run(out)
    held = {rank: [step for step, holder, _ in run.files if holder == rank] for rank in (0, 1)}
    # Each rank by what it saw: a NaN of the forward reaches every rank in the same step, by gradients at the latest.
    assert held == {0: [4, 5, 6, 7], 1: [4, 5, 6, 7]}
    assert {event["step"] for event in recorder_events(out)} == {7}
    first = next(finding for finding in diagnose(run).findings if finding.what == "non_finite")
    assert first.where["step"] == 7
    assert first.where["name"].startswith("decoder.layers.2.mlp")
    assert 1 in first.where["ranks"]


def test_clean_run_writes_nothing(tmp_path):
    out = job(tmp_path, "single")
    assert open_run(out).files == []
    assert recorder_events(out) == []
    assert summarise(open_run(out)).warnings == []
    ledger = json.loads((out / "ranks" / "rank_00000.json").read_text())["ledger"]["recorder"]
    assert ledger["kept"] == [6, 7, 8, 9]
    assert ledger["bound"]["modules"] > 10


@pytest.mark.parametrize(("fault", "steps"), [("exception", [4, 5, 6, 7]), ("signal", [3, 4, 5, 6])])
def test_exception_and_signal(fault, steps, tmp_path):
    out = job(tmp_path, "single", fault)
    assert open_run(out).steps == steps
    [event] = recorder_events(out)
    assert event["steps"] == steps
    rows = open_run(out).rows(step=7).filter("phase = 'forward'").fetchall() if fault == "exception" else []
    # The step that did not end is there as far as it came: layers up to the one that failed.
    assert bool(rows) == (fault == "exception")


@pytest.mark.parametrize("asked", [True, False])
def test_an_alert_that_asks_for_it_writes_where_others_do_not(asked, tmp_path):
    alert = "{rule: nonfinite, action: {recorder: true}}" if asked else "nonfinite"
    probe = f"monitor: {{activations: false, alerts: [{alert}]}}\nrecorder: {{keep_steps: 3, on: [signal]}}\n"
    out = job(tmp_path, "single", "nan", probe=probe)
    assert [event["step"] for event in read_events(out) if event["event"] == "alert"] == [7]
    assert [event["steps"] for event in recorder_events(out)] == [[5, 6, 7]] * asked


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)])
def test_a_job_that_is_ended_from_outside_while_it_hangs(number, code, tmp_path):
    """The training thread sleeps for ever in its sixth step: who writes is a thread that the signal wakes."""
    process = multiprocessing.get_context("fork").Process(target=hang, args=(str(tmp_path), int(number)))
    prepare()
    process.start()
    process.join(120)
    try:
        assert process.exitcode == code
    finally:
        process.kill()
    [event] = recorder_events(tmp_path / "out")
    assert event["steps"] == open_run(tmp_path / "out").steps == [3, 4, 5, 6]
    assert signal.Signals(number).name in event["text"]


def test_steps_of_the_dump_stay_the_dump_s(tmp_path):
    probe = "steps: [6]\ndump: {level: L0}\nrecorder: {keep_steps: 3}\n"
    out = job(tmp_path, "single", "nan", probe=probe)
    assert open_run(out).steps == [4, 5, 6, 7]
    [event] = recorder_events(out)
    assert event["steps"] == [4, 5, 7]


def test_memory_is_bounded(tmp_path):
    out = job(tmp_path, "single", "nan", probe="recorder: {keep_steps: 6}\nlimits: {host_memory: 2MiB}\n", steps=9)
    steps = open_run(out).steps
    assert steps and steps[-1] == 7 and len(steps) < 6
    assert any("quarter of limits.host_memory" in event["text"] for event in read_events(out))
