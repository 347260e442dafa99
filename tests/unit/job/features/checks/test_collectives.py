"""Communication: results alike on all members, sums right, messages as sent; damage is named at its first step."""

import time
from pathlib import Path

import numpy as np
import pytest
from torch import distributed

from msprobe_megatron.job.features.checks.collectives import Call, CheckStats, Communication, Exchanged
from msprobe_megatron.job.store import Bulletin, StoreChannel
from msprobe_megatron.topology.groups import GroupFacts
from tests.unit.job.features.checks.jobs import job
from tests.unit.job.features.checks.test_checks import ledgers, replica_alerts

PROBE = "checks: {replicas: false, rng: false, optimizer: false, collectives: true, every: 1}\n"


@pytest.mark.parametrize(
    "layout", ["tp2_sp", "pp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ep2", "dp2_distopt"))]
)
def test_clean_jobs_are_silent_and_were_compared(layout, tmp_path):
    out = job(tmp_path, layout, probe=PROBE)
    assert replica_alerts(out) == []
    for ledger in ledgers(out):
        assert ledger["collectives"] == 6
        assert not ledger.get("missed") and not ledger["fault"]


@pytest.mark.parametrize(
    ("fault", "layout", "name"),
    [
        ("damaged_reduction", "tp2", "all_reduce"),
        ("damaged_message", "pp2", "message"),
    ],
)
def test_damage_is_named(fault, layout, name, tmp_path):
    first = replica_alerts(job(tmp_path, layout, fault, probe=PROBE))[0]
    assert (first["step"], first["check"], first["ranks"]) == (2, "collectives", [0, 1])
    assert name in first["name"]


RANKS = GroupFacts("tp", (0, 1, 2))


def group(inputs, outputs, dtype="float32", mean=False, spread=False):
    """What three ranks find that gave `inputs` to one reduction and hold `outputs`."""
    store, found, missed = distributed.HashStore(), {}, []
    members = {}
    for rank in range(3):
        tensors = [np.asarray(inputs[rank], np.float64), np.asarray(outputs[rank], np.float64)]
        floats = np.array([[x.min(), x.max(), x[np.isfinite(x)].sum(), (x**2).sum(), abs(x).max()] for x in tensors])
        counts = np.array([[np.isnan(x).sum(), 0, 0, 0] for x in tensors], np.int64)
        digests = np.array([abs(hash(x.tobytes())) for x in tensors], np.uint64)
        call = Call("all_reduce.0", 0, 1, len(tensors[0]), dtype, mean, spread)
        members[rank] = (Exchanged({RANKS: [call]}, {}, {}), CheckStats(floats, counts, digests))
    boards = {
        rank: Communication(
            Bulletin(StoreChannel(Path("run"), "checks", store), rank), rank, lambda *a: missed.append(a)
        )
        for rank in range(3)
    }
    for rank, (exchanged, figures) in members.items():
        boards[rank].post(0, exchanged, figures)
    for rank, (exchanged, figures) in members.items():
        found[rank] = [event["text"] for event in boards[rank].check(0, exchanged, figures, time.monotonic() + 5)]
    assert not missed
    return [text for texts in found.values() for text in texts]


def test_a_right_sum_and_a_right_mean():
    inputs = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    total = inputs.sum(0, dtype=np.float32)
    assert group(inputs, [total] * 3) == []
    assert group(inputs, [total / 3] * 3, mean=True) == []


def test_a_sum_without_one_rank():
    inputs = np.random.default_rng(0).standard_normal((3, 50))
    assert group(inputs, [inputs[0] + inputs[1]] * 3) == [
        "the result of all_reduce.0 over tp is not the sum of the inputs of the ranks"
    ]


def test_one_rank_with_another_result():
    inputs = np.random.default_rng(0).standard_normal((3, 50))
    total = inputs.sum(0)
    other = total.copy()
    other[3] = np.nextafter(other[3], 9)
    assert group(inputs, [total, total, other]) == ["the result of all_reduce.0 over tp is not the same on ranks [2]"]


def test_a_result_that_is_cut_over_the_ranks():
    inputs = np.random.default_rng(0).standard_normal((3, 51)).astype(np.float32)
    parts = inputs.sum(0).reshape(3, 17)
    assert group(inputs, parts, spread=True) == []
    parts[1] = inputs[1, 17:34]
    assert group(inputs, parts, spread=True) == [
        "the result of all_reduce.0 over tp is not the sum of the inputs of the ranks"
    ]


def test_sums_with_a_nan_are_not_judged():
    inputs = np.ones((3, 4))
    inputs[1, 2] = np.nan
    assert group(inputs, [np.full(4, 7.0)] * 3) == []
