"""The way to the first divergence: what ranks hold, what carried it, and the communication that is missing."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analyse.exchanges import Exchange
from msprobe_megatron.analyse.load import open_run
from msprobe_megatron.analyse.view_flow import _carried, _own_microbatch
from msprobe_megatron.report.html.page import page, page_data
from tests.demo_runs import demo_run
from tests.report.browser import load, tab

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
    assert text.startswith("no communication here, though in other layers it ends in all_reduce over tp, ranks 0, 1")
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
        Exchange("send", "pp", [0, 2], "", 0, 0, "forward", 2048),
        Exchange("send", "pp", [9, 8], "", 0, 0, "forward", 1),
    ]
    assert _carried(stop(), sends, {0, 1}, {2, 3}) == ["carried by send rank 0 to rank 2, 2.0 KiB, arrived as sent"]
    assert _carried(stop(), sends, {0, 1}, {0, 1}) == []
    broken = Exchange("send", "pp", [0, 2], "", 0, 0, "forward", 2048, finding="rank 2 got 3, not 4")
    assert _carried(stop(), [broken], {0}, {2}) == ["carried by send rank 0 to rank 2, 2.0 KiB: rank 2 got 3, not 4"]


def test_a_module_that_never_communicates_misses_nothing():
    other = Exchange("all_reduce", "tp", [0, 1], "decoder.layers.0.mlp.linear_fc2", 0, 0, "forward", 64)
    here = stop(name="decoder.layers.1.mlp.linear_fc1", io="output", first=True)
    assert _carried(here, [other], {0, 1}, {0, 1}) == []


@pytest.mark.parametrize(
    ("samples_from", "size", "dp", "expected"),
    [(0, 2, 1, (0, 0)), (6, 2, 1, (3, 0)), (6, 2, 2, (1, 1)), (4, 1, 4, (1, 0)), (None, 2, 2, (5, None))],
)
def test_samples_are_found_in_the_microbatch_of_this_layout(samples_from, size, dp, expected):
    entry = stop(samples_from=samples_from, microbatch=5)
    _own_microbatch(entry, size, dp)
    assert (entry["microbatch"], entry["dp"]) == expected
