"""What one rank has a reason to write, the others write too: the same steps, with no collective."""

import json
from pathlib import Path

import pytest
from torch.distributed import HashStore

from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.job.features.recorder.peers import Call, PeerNotices
from msprobe_megatron.run_directory.directory import read_events
from tests.unit.job.features.recorder.jobs import job

# Only ranks of the last stage see a loss.
PROBE = """
monitor: {activations: false, gradients: true, optimizer: false,
          alerts: [{rule: custom, expression: 'step == 5 and kind == "loss" and name == "lm loss"'}]}
recorder: {keep_steps: 3, on: [alert]}
"""


def dumped(run, ranks):
    """Steps of which each rank has a dump; the monitor's are of all steps."""
    held = [(step, rank) for step, rank, _ in run.files if step in run.dumped_steps]
    return {rank: [step for step, holder in held if holder == rank] for rank in ranks}


@pytest.mark.parametrize("layout", ["pp2", "tp2_pp2"])
def test_an_alert_of_one_stage_leaves_the_steps_of_all_ranks(tmp_path, layout):
    out = job(tmp_path, layout, probe=PROBE, steps=14, pause=0.05)
    alerted = {event["rank"] for event in read_events(out) if event["event"] == "alert"}
    ranks = set(range(2 if layout == "pp2" else 4))
    assert alerted and alerted < ranks, "every rank saw it by itself: the test shows nothing"
    run = open_run(out)
    assert {
        rank: [step for step, holder, _ in run.files if holder == rank and step in run.dumped_steps] for rank in ranks
    } == {rank: [3, 4, 5] for rank in ranks}
    told = {event["rank"]: event["reason"] for event in read_events(out) if event["event"] == "recorder"}
    assert all(told[rank].startswith("alert custom on rank") for rank in ranks - alerted)
    for rank in ranks:
        ledger = json.loads((out / f"ranks/rank_{rank:05d}.json").read_text())["ledger"]["recorder"]
        assert ledger["kept"] == [11, 12, 13] and ledger["missed"] == 0 and ledger["notes"] == []


def test_a_request_to_one_rank_is_one_to_all(tmp_path):
    out = job(tmp_path, "tp2", "signal to one", steps=14, pause=0.05)
    run = open_run(out)
    assert {
        rank: [step for step, holder, _ in run.files if holder == rank and step in run.dumped_steps] for rank in (0, 1)
    } == {rank: [3, 4, 5, 6] for rank in (0, 1)}
    told = {event["rank"]: event["reason"] for event in read_events(out) if event["event"] == "recorder"}
    assert told == {1: "signal SIGUSR1", 0: "signal SIGUSR1 on rank 1"}


def test_calls_reach_the_others_once():
    store = HashStore()
    first, second, third = (PeerNotices(Path("run"), rank, store) for rank in range(3))
    elsewhere = PeerNotices(Path("another run"), 3, store)
    assert first.news() == []
    first.post(7, "alert spike")
    second.post(7, "alert spike")  # the same step: said already
    second.post(9, "non-finite x")
    assert third.news() == [Call(7, 0, "alert spike"), Call(9, 1, "non-finite x")]
    assert third.news() == [] and elsewhere.news() == []
    assert first.news() == [Call(9, 1, "non-finite x")]
    assert second.news() == [Call(7, 0, "alert spike")]


def test_calls_of_a_session_before_are_not_heard():
    store = HashStore()
    PeerNotices(Path("run"), 0, store).post(7, "alert spike")
    again = [PeerNotices(Path("run"), rank, store) for rank in range(2)]
    assert again[1].news() == []
    again[0].post(7, "alert spike")
    assert again[1].news() == [Call(7, 0, "alert spike")]


def test_a_store_that_is_gone_is_no_fault_of_the_job():
    class Gone:
        def add(self, key, amount):
            return 0

        def check(self, keys):
            raise ConnectionError("the store has closed")

    calls = PeerNotices(Path("run"), 0, Gone())
    assert calls.news() == [] and calls.fault == "ConnectionError: the store has closed"
    calls.post(3, "nobody hears it")
