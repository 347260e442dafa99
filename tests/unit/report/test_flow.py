"""The way to the first divergence: what ranks hold, what carried it, and the communication that is missing."""

import math
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.diagnose.exchanges import MatchedExchange
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.page import versus as flow_data
from msprobe_megatron.analysis.page.page_data import page_data
from msprobe_megatron.analysis.page.versus import _own_microbatch, _transfers, flow, follow
from msprobe_megatron.report.html.page import page
from tests.support.demo_runs import demo_run
from tests.unit.report.browser import load, tab

PROBE = "steps: [0]\ndump: {level: mix}\n"
FLAGS = "--num-layers 4 --micro-batch-size 1 --global-batch-size 2 --train-iters 1"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One card, and two tensor-parallel ranks of which the second MLP of layer 2 is not added up."""
    folder = tmp_path_factory.mktemp("flow")
    demo_run(folder, PROBE, FLAGS, name="golden")
    demo_run(folder, PROBE, f"{FLAGS} --tensor-model-parallel-size 2", world=2, fault="no_reduction", name="tp2")
    return folder


@pytest.fixture(scope="module")
def data(runs):
    return page_data(open_run(runs / "tp2"), open_run(runs / "golden"))


def test_a_missing_reduction_is_named_with_what_ranks_hold(runs, data):
    stops = data["versus"]["flow"]
    (at,) = [i for i, stop in enumerate(stops) if stop["first"]]
    first = stops[at]
    assert (first["name"], first["io"]) == ("decoder.layers.2.mlp.linear_fc2", "output")
    assert {stop["state"] for stop in stops[:at]} == {"agree"}
    (text,) = first["carried"]
    assert text.startswith("no communication here, although in other layers it ends in all_reduce over tp, ranks 0, 1")
    for rank, norm, *_ in first["ranks"]:
        rows = pq.read_table(runs / f"tp2/step_000000/rank_{rank:05d}/records.parquet").to_pylist()
        (held,) = [r for r in rows if all(r[k] == first[k] for k in ("name", "io", "path", "kind", "microbatch"))]
        assert norm == pytest.approx(np.sqrt(held["sumsq"]), rel=1e-5)
    assert [rank for rank, *_ in first["ranks"]] == [0, 1]


def test_it_reads_in_a_browser(browser, data, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page(data), encoding="utf-8")
    load(browser, path)
    tab(browser, "versus")
    shown = browser.find_element("css selector", "#flow .stop.first").text
    assert "rank 0: " in shown and "rank 1: " in shown and "no communication here" in shown
    assert browser.get_log("browser") == []


def stop(**changes):
    return {"name": "x", "io": "input", "microbatch": 0, "phase": "forward", "first": False, **changes}


def test_what_arrives_at_another_stage_names_the_message():
    sends = [
        MatchedExchange("send", "pp", [0, 2], "", 0, 0, "forward", 2048),
        MatchedExchange("send", "pp", [9, 8], "", 0, 0, "forward", 1),
    ]
    assert _transfers(stop(), sends, {0, 1}, {2, 3}) == ["via send rank 0 to rank 2, 2.0 KiB, received as sent"]
    assert _transfers(stop(), sends, {0, 1}, {0, 1}) == []
    others = [MatchedExchange("send", "pp", ranks, "", 0, 0, "forward", 1) for ranks in ([9, 2], [2, 9], [2, 0])]
    assert _transfers(stop(), others, {0, 1}, {2, 3}) == [], "from elsewhere, or away from here"
    broken = MatchedExchange("send", "pp", [0, 2], "", 0, 0, "forward", 2048, finding="rank 2 got 3, not 4")
    assert _transfers(stop(), [broken], {0}, {2}) == ["via send rank 0 to rank 2, 2.0 KiB: rank 2 got 3, not 4"]


def test_a_module_that_never_communicates_misses_nothing():
    other = MatchedExchange("all_reduce", "tp", [0, 1], "decoder.layers.0.mlp.linear_fc2", 0, 0, "forward", 64)
    here = stop(name="decoder.layers.1.mlp.linear_fc1", io="output", first=True)
    assert _transfers(here, [other], {0, 1}, {0, 1}) == []


@pytest.mark.parametrize(
    ("samples_from", "size", "dp", "expected"),
    [(0, 2, 1, (0, 0)), (6, 2, 1, (3, 0)), (6, 2, 2, (1, 1)), (4, 1, 4, (1, 0)), (None, 2, 2, (5, None))],
)
def test_samples_are_found_in_the_microbatch_of_this_layout(samples_from, size, dp, expected):
    entry = stop(samples_from=samples_from, microbatch=5)
    _own_microbatch(entry, size, dp)
    assert (entry["microbatch"], entry["dp"]) == expected


def entry(place, **changes):
    sides = {f"{name}_{side}": 4.0 for name in ("sumsq", "min", "max") for side in ("golden", "run")}
    counts = {f"{name}_{side}": 0 for name in ("n_nan", "n_posinf", "n_neginf") for side in ("golden", "run")}
    words = {"kind": "activation", "io": "output", "path": "0", "phase": "forward", "op": "", "state": "agree"}
    numbers = {"step": 1, "microbatch": 0.0, "samples_from": 0.0, "error": 0.0, "tolerance": 1.0}
    return {"name": f"m{place}", **words, **numbers, **sides, **counts, **changes}


def flow_of(rows, at):
    first = SimpleNamespace(**rows[at])
    if math.isnan(rows[at]["microbatch"]):
        first.microbatch = None
    return flow(SimpleNamespace(first_divergence=first, table=pa.Table.from_pylist(rows)))


def test_stops_are_the_few_around_the_first_divergence():
    rows = [entry(n) for n in range(30)]
    rows[20] |= {"state": "diverged", "n_nan_run": 1, "n_posinf_run": 2, "n_neginf_run": 4}
    for n, changes in {18: {"state": "only_left"}, 17: {"state": "layout"}, 16: {"microbatch": 1.0}}.items():
        rows[n] |= changes
    rows += [entry(40, step=2), entry(41, kind="gradient")]
    stops = flow_of(rows, 20)
    assert [stop["name"] for stop in stops] == [
        *(f"m{n}" for n in (10, 11, 12, 13, 14, 15, 19)),
        *(f"m{n}" for n in range(20, 27)),
    ]
    (first,) = [stop for stop in stops if stop["first"]]
    assert (first["name"], first["run"]["bad"], first["golden"]["bad"]) == ("m20", 7, 0)
    assert first["run"]["norm"] == 2.0


def test_what_belongs_to_no_microbatch_stands_with_its_like():
    rows = [entry(0, microbatch=0.0), *(entry(n, microbatch=math.nan, kind="gradient") for n in (1, 2, 3))]
    stops = flow_of(rows, 2)
    assert [(stop["name"], stop["microbatch"]) for stop in stops] == [("m1", None), ("m2", None), ("m3", None)]


def test_only_exchanges_of_its_ranks_microbatch_and_phase_carry_it():
    def reduce(ranks, microbatch=0, phase="forward"):
        return MatchedExchange("all_reduce", "tp", ranks, "x", 0, microbatch, phase, 1024)

    others = [reduce([4, 5]), reduce([0, 1], microbatch=1), reduce([0, 1], phase="backward")]
    assert _transfers(stop(io="output"), others, None, {0, 1}) == []
    assert _transfers(stop(io="output"), [*others, reduce([0, 1])], None, {0, 1}) == [
        "via all_reduce over tp, ranks 0, 1, 1.0 KiB"
    ]


def test_messages_are_looked_for_from_the_last_ranks_that_held_something(monkeypatch):
    """Four stops on two stages of two data-parallel ranks; nobody holds the second."""
    held = {"m0": [0, 1], "m1": [], "m2": [2, 3], "m3": [2, 3]}
    monkeypatch.setattr(flow_data, "micro_batch_size", lambda run, table: 2)
    sends = [MatchedExchange("send", "pp", ranks, "", 1, 0, "forward", 1024) for ranks in ([0, 2], [1, 3])]
    monkeypatch.setattr(flow_data, "exchanges", lambda run, step: sends)

    def ask(question, values):
        return [(rank, 2.0, "", 0, rank % 2) for rank in held[values[2]]]

    run = SimpleNamespace(sizes={"dp": 2})
    view = SimpleNamespace(run=run, connection=SimpleNamespace(table=lambda name: None), ask=ask)
    stops = [stop(name=name, step=1, kind="activation", path="0", samples_from=2.0) for name in held]
    assert follow(stops, view) == {"communication": True}
    # Samples 2 and 3 are those of the second data-parallel rank's first microbatch.
    assert [[rank for rank, *_ in one["ranks"]] for one in stops] == [[1], [], [3], [3]]
    assert [one["carried"] for one in stops] == [
        [],
        [],
        ["via send rank 1 to rank 3, 1.0 KiB, received as sent"],
        [],
    ]
    assert follow([], view) == {"communication": False}
