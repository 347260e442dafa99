"""What was looked at and found in order, and the lists of what was found: from runs that are made up."""

from dataclasses import dataclass
from types import SimpleNamespace

import duckdb
import pytest

from msprobe_megatron.analysis.diagnose.suspects import Anomaly
from msprobe_megatron.analysis.page import page_data as alert_data
from msprobe_megatron.analysis.page.findings import in_order
from msprobe_megatron.analysis.page.page_data import alerts, compared, examined

LOOKS = [("fc1", "ok"), ("fc1", "ok"), ("fc2", "wrong"), ("fc1", "ok"), ("fc2", "ok")]


def run(ledgers=(), perturb=False):
    """A run of two steps; a ledger a rank."""
    connection = duckdb.connect()

    def rows():
        values = ", ".join(f"('{name}', '{{\"verdict\": \"{word}\"}}')" for name, word in LOOKS)
        return connection.sql(f"select * from (values {values}) t(name, extra)")

    return SimpleNamespace(
        steps=[3, 4],
        files=[(step, rank, "") for step in (3, 4) for rank in range(2)],
        ranks={rank: {"ledger": ledger} for rank, ledger in enumerate(ledgers)},
        perturb=["part"] if perturb else [],
        perturb_rows=rows,
    )


def view(of, copies=(1, 2, 4, 1, 1)):
    connection = duckdb.connect()
    connection.execute("create table whole(copies integer)")
    for number in copies:
        connection.execute("insert into whole values (?)", [number])
    return SimpleNamespace(run=of, ask=lambda question: connection.execute(question).fetchall())


QUIET = {"finite": True, "alike": True, "alerts": 0, "suspects": 0}
LEDGERS = [
    {"checks": {"compared": 2, "groups": {"tp": [0, 1]}}, "alerts": {"asked": ["nonfinite", "spike"]}, "recorder": {}},
    {"checks": {"compared": 3, "groups": {"dp": [1]}}, "alerts": {"asked": ["spike"]}, "recorder": {"written": []}},
]
TENSORS = "no NaN and no Inf in 5 tensors"
REPLICAS = "replicas agree on all 2 replicated tensors"
SUSPECTS = "no suspect in 5 checks of 2 operators"
CHECKS = "replicas identical in 3 comparisons (tp, dp)"
ALERTS = "no alert (nonfinite, spike)"
RECORDER = "the flight recorder was not triggered"


def test_each_part_says_how_much_it_looked_at():
    text = in_order(view(run(LEDGERS, perturb=True)), **QUIET)
    assert text == f"2 steps, 2 ranks: {', '.join((TENSORS, REPLICAS, SUSPECTS, CHECKS, ALERTS, RECORDER))}."


@pytest.mark.parametrize(
    ("found", "silent"),
    [
        ({"finite": False}, [TENSORS]),
        ({"alike": False}, [REPLICAS]),
        ({"suspects": 1}, [SUSPECTS]),
        ({"alerts": 2}, [CHECKS, ALERTS, RECORDER]),
    ],
)
def test_what_found_something_does_not_say_that_all_is_well(found, silent):
    text = in_order(view(run(LEDGERS, perturb=True)), **{**QUIET, **found})
    for sentence in (TENSORS, REPLICAS, SUSPECTS, CHECKS, ALERTS, RECORDER):
        assert (sentence in text) == (sentence not in silent), sentence


def test_what_was_not_switched_on_says_nothing():
    assert in_order(view(run(), copies=()), **QUIET) == ""
    assert in_order(view(run(), copies=(1,)), **QUIET) == "2 steps, 2 ranks: no NaN and no Inf in 1 tensors."


def test_a_recorder_that_wrote_on_any_rank_had_a_reason():
    ledgers = [{"recorder": {}}, {"recorder": {"written": [7]}}]
    assert in_order(view(run(ledgers), copies=()), **QUIET) == ""


def test_alerts_are_cut_and_it_is_said(monkeypatch):
    def told(number):
        event = {"event": "nonfinite", "step": number, "name": "x", "text": "NaN"}
        return [Anomaly({**event, "step": n, **({"rule": "spike"} if n else {})}, [0, 1], None) for n in range(number)]

    for number in (500, 501):
        monkeypatch.setattr(alert_data, "anomalies", lambda run, n=number: told(n))
        found = alerts(run())
        assert [alert["step"] for alert in found["alerts"]] == list(range(500))
        assert found["notes"] == (["500 of 501 alerts are shown."] if number == 501 else [])
    assert [alert["rule"] for alert in found["alerts"][:2]] == ["nonfinite", "spike"], "an event without a rule"
    assert found["alerts"][0]["ranks"] == [0, 1]


@dataclass
class Suspected:
    place: int


def test_examined_counts_operators_once_and_verdicts_each(monkeypatch):
    assert examined(run()) is None
    monkeypatch.setattr(alert_data, "suspects", lambda run: [Suspected(n) for n in range(101)])
    monkeypatch.setattr(alert_data, "steps_of", lambda part: [4, 3])
    found = examined(run(perturb=True))
    assert found.pop("suspects") == [{"place": n} for n in range(100)], "the worst, and they come first"
    assert found == {"steps": [3, 4], "operators": 2, "verdicts": {"ok": 4, "wrong": 1}}


def test_a_group_is_listed_once_with_what_was_left_out():
    both = {"compared": 3, "groups": {"tp": [0, 1], "dp": [0]}, "notes": ["no rng"], "fault": "gloo is gone"}
    other = {"compared": 9, "groups": {"tp": [0, 1], "dp": [1]}}
    found = compared(run([{"checks": both}, {"checks": other}, {"checks": None}, {}]))
    assert [(entry["group"], entry["ranks"], entry["times"]) for entry in found] == [
        ("tp", [0, 1], 3),
        ("dp", [0], 3),
        ("dp", [1], 9),
    ]
    assert found[0]["notes"] == ["no rng", "gloo is gone"] and found[2]["notes"] == []
