"""Anomalies of all ranks come out in order of cause, once each, with the samples of their microbatch."""

import json
import random

import pytest

from msprobe_megatron.analysis.diagnose.suspects import anomalies
from msprobe_megatron.analysis.load.run import Run


@pytest.fixture
def run(tmp_path):
    """Two stages of two virtual ones each, two data parallel ranks: rank = dp + 2 * pp."""
    places = {rank: {"pp": rank // 2, "pp_size": 2, "dp": rank % 2, "dp_size": 2} for rank in range(4)}
    facts = {"arguments": {"micro_batch_size": 3, "global_batch_size": 24}}
    return Run(tmp_path, facts, {rank: {"coordinates": place} for rank, place in places.items()})


def event(step, microbatch, phase, rank, seq=0, vpp=0, **more):
    found = {"event": "alert", "rule": "spike", "step": step, "microbatch": microbatch, "phase": phase}
    return {**found, "rank": rank, "seq": seq, "vpp": vpp, "kind": "activation", "name": f"x{rank}{vpp}{seq}", **more}


ORDER = [
    event(3, None, "optimizer", 1, kind="parameter", name="weight"),
    event(3, 0, "forward", 0, seq=5),
    event(3, 0, "forward", 0, seq=9),
    event(3, 0, "forward", 2, seq=1),
    event(3, 0, "forward", 0, seq=20, vpp=1),
    event(3, 0, "forward", 2, seq=2, vpp=1),
    event(3, 0, "recompute", 2, seq=40, vpp=1),
    event(3, 0, "backward", 2, seq=50, vpp=1),
    event(3, 0, "backward", 0, seq=30, vpp=1),
    event(3, 0, "backward", 2, seq=60),
    event(3, 0, "backward", 0, seq=70),
    event(3, 1, "forward", 0, seq=2),
    event(3, None, "optimizer", 0, seq=90, kind="grad_reduced"),
    event(4, 0, "forward", 0, seq=0),
]


def write(run, events):
    (run.path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))


def test_order_of_cause(run):
    mixed = random.Random(1).sample(ORDER, len(ORDER))
    write(run, mixed)
    assert [found.event for found in anomalies(run)] == ORDER


def test_ranks_that_say_the_same_are_one(run):
    write(run, [event(3, 0, "forward", rank, name="a", seq=rank) for rank in (3, 2)] + [{"event": "drop", "step": 1}])
    [found] = anomalies(run)
    assert (found.ranks, found.event["rank"]) == ([2, 3], 2)
    assert found.text.startswith("step 3, ranks [2, 3]: ")


def test_samples_of_the_microbatch(run):
    write(run, [event(2, 1, "forward", 3, kind="loss", data={"tokens.0": "ff"}, text="spike")])
    [found] = anomalies(run)
    # Two steps of 24, then microbatch 0 of both data parallel ranks and microbatch 1 of the first: 48 + 9.
    assert found.samples == (57, 59)
    assert "samples 57-59 in order of consumption (tokens.0 ff)" in found.text


def test_events_without_places_come_with_their_step(run):
    write(run, [{"event": "alert", "step": 9, "rank": 77, "text": "x"}, {"event": "check", "text": "y"}])
    assert [found.text for found in anomalies(run)] == ["step 9, rank 77: x", "step None, rank -1: y"]


def test_diagnose_lists_them_in_that_order(tmp_path):
    from msprobe_megatron.analysis.diagnose.diagnose import diagnose

    found = Run(tmp_path, {})
    write(found, [event(5, 0, "forward", 0, text="late"), event(2, 0, "backward", 0, text="early")] * 12)
    texts = [finding.text for finding in diagnose(found).findings if finding.what == "alert"]
    assert ["early" in texts[0], "late" in texts[1]] == [True, True]
