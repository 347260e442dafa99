"""Ranks that should hold the same: every seeded fault is named at the first step it acts, clean jobs are silent."""

import json

import pytest

from msprobe_megatron.run_directory.directory import read_events
from tests.unit.job.features.checks.jobs import job


def replica_alerts(out):
    return [event for event in read_events(out) if event.get("rule") == "replica"]


def ledgers(out):
    return [json.loads(path.read_text())["ledger"]["checks"] for path in sorted((out / "ranks").glob("*.json"))]


CASES = {
    "norms_not_reduced": ("tp2_sp", "tp", "grad_reduced", "layernorm"),
    "bucket_skipped": ("dp2", "dp-cp", "grad_reduced", "weight"),
    "embedding_not_synchronised": ("pp2", "embedding", "grad_reduced", "embedding.word_embeddings.weight"),
    "flip_dp": ("dp2", "dp-cp", "parameter", "decoder.layers.1.mlp.linear_fc1.weight"),
    "flip_tp": ("tp2", "tp", "parameter", "decoder.layers.2.input_layernorm.weight"),
}


@pytest.mark.parametrize("fault", CASES)
def test_fault_is_named_at_its_first_step(fault, tmp_path):
    layout, group, kind, name = CASES[fault]
    out = job(tmp_path, layout, fault)
    first = replica_alerts(out)[0]
    assert (first["step"], first["group"], first["kind"], first["ranks"]) == (2, group, kind, [0, 1])
    assert name in first["name"]
    assert first["name"] in first["text"]
    [rows] = [open_rows(out, first)]
    assert (rows[0]["kind"], rows[0]["name"], rows[0]["step"]) == ("check", first["name"], 2)


def open_rows(out, event):
    import pyarrow.parquet as pq

    [path] = (out / "monitor" / f"rank_{event['rank']:05d}").glob(f"checks_{event['step']:06d}_*.parquet")
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize(
    ("fault", "layout", "name"),
    [
        ("same_generators", "tp2", "model-parallel-rng"),
        ("other_rate", "dp2", "learning rate"),
    ],
)
def test_state_that_differs_or_does_not(fault, layout, name, tmp_path):
    events = replica_alerts(job(tmp_path, layout, fault))
    assert [event["step"] for event in events if event["name"] == name] == [0]


@pytest.mark.parametrize(
    "layout",
    [
        "tp2_pp2",
        "dp2_distopt",
        pytest.param("ep2", marks=pytest.mark.slow),
        pytest.param("pp2_vpp2", marks=pytest.mark.slow),
    ],
)
def test_clean_jobs_are_silent_and_were_compared(layout, tmp_path):
    out = job(tmp_path, layout)
    assert replica_alerts(out) == []
    for ledger in ledgers(out):
        assert ledger["compared"] == 6 * len(ledger["groups"])
        assert not ledger.get("missed") and not ledger["fault"] and not ledger.get("dropped")


def test_shards_of_the_optimizer_that_do_not_tile(tmp_path):
    [event] = replica_alerts(job(tmp_path, "dp2_distopt", "overlapping_shards"))
    assert (event["check"], event["step"], event["ranks"]) == ("optimizer", 0, [0, 1])
    assert "belong to two ranks" in event["text"]


def test_groups_that_are_not_wholly_selected_are_left_out(tmp_path):
    out = job(tmp_path, "dp2", "flip_dp", probe="ranks: [0]\nchecks: {every: 1}\n")
    assert replica_alerts(out) == []
    assert any("not all selected" in event.get("text", "") for event in read_events(out))


def test_every_and_switches(tmp_path):
    out = job(tmp_path, "tp2", "flip_tp", probe="checks: {every: 3, rng: false, optimizer: false}\n")
    assert [event["step"] for event in replica_alerts(out)] == [3]
    assert [ledger["compared"] for ledger in ledgers(out)] == [2, 2]
