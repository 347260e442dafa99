"""What the page is told: figures derived anew from the files of the run, verdicts, budgets, and safe embedding."""

import json
import os
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.page.page_data import page_data
from msprobe_megatron.analysis.page.table import open_view, packed, short
from msprobe_megatron.analysis.page.trends import series, shards, thinned
from msprobe_megatron.cli import main
from msprobe_megatron.report.files.files import OutputError, write_whole
from msprobe_megatron.report.html.page import embedded_json, page, policy
from msprobe_megatron.topology.layers import layer_of


def rows(run, step=None):
    """All rows of a run as plain dicts, read without the kit."""
    pattern = f"step_{step:06d}" if step is not None else "step_*"
    return [
        row for file in sorted(run.glob(f"{pattern}/rank_*/records.parquet")) for row in pq.read_table(file).to_pylist()
    ]


def entry(data, kind, name, io):
    return next(t for t in data["series"]["tensors"] if (t["kind"], t["name"], t["io"]) == (kind, name, io))


def test_trend_of_a_cut_weight_is_the_norm_of_its_parts(pages):
    data = pages.data("healthy")
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    shown = entry(data, "parameter", name, "weight")["norm"]
    for i, step in enumerate(data["series"]["steps"]):
        parts = [
            row["sumsq"]
            for row in rows(pages.run("healthy"), step)
            if (row["name"], row["kind"]) == (name, "parameter")
        ]
        assert len(parts) == 2
        assert shown[i] == pytest.approx(np.sqrt(np.sum(np.array(parts, np.float64))), rel=1e-5)


def test_trends_of_two_layouts_are_the_same_curves(pages):
    data, golden = pages.data("healthy"), pages.data("golden")
    for name in ("decoder.layers.0", "decoder.layers.3"):
        left, right = (np.array(entry(side, "activation", name, "output")["norm"]) for side in (data, golden))
        np.testing.assert_allclose(left, right, rtol=1e-4)
    losses = [np.array(side["losses"]["losses"]["lm loss"]) for side in (data, golden)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    norms = [np.array(side["losses"]["gradient_norm"]) for side in (data, golden)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)


def test_mean_loss_is_sum_over_count(pages):
    data = pages.data("golden")
    held = [row for row in rows(pages.run("golden"), 1) if row["kind"] == "loss" and row["name"] == "lm loss"]
    total = sum(row["sum"] for row in held if row["path"] == "0")
    count = sum(row["sum"] for row in held if row["path"] == "1")
    at = data["losses"]["steps"].index(1)
    assert data["losses"]["losses"]["lm loss"][at] == pytest.approx(total / count, rel=1e-5)


def test_heat_maps_are_sums_over_the_layer_and_the_rank(pages):
    data, run = pages.data("golden"), pages.run("golden")
    table = data["heat"]["layers"]
    held = [
        row
        for row in rows(run, 2)
        if row["kind"] == "gradient" and layer_of(row["name"]) == 2 and "float" in row["dtype"]
    ]
    at = data["heat"]["steps"].index(2)
    place = table["kinds"]["gradient"]["norm"][table["names"].index("layer 2")]
    assert place[at] == pytest.approx(np.sqrt(sum(row["sumsq"] for row in held)), rel=1e-5)
    data, run = pages.data("healthy"), pages.run("healthy")
    held = [row for row in rows(run, 2) if row["kind"] == "parameter" and row["rank"] == 3]
    place = data["heat"]["ranks"]["kinds"]["parameter"]["absmax"][data["heat"]["ranks"]["names"].index(3)]
    assert (place[at] if isinstance(place, list) else place) == pytest.approx(
        max(row["absmax"] for row in held), rel=1e-5
    )


def test_places_follow_the_order_of_execution(pages):
    names = pages.data("healthy")["heat"]["layers"]["names"]
    order = [names.index(name) for name in ("embedding", "layer 0", "layer 3", "output_layer")]
    assert order == sorted(order)


def test_stages_ranks_and_stacks(pages):
    data = pages.data("healthy")
    assert [(stage["pp"], stage["ranks"]) for stage in data["stages"]] == [(0, [0, 1]), (1, [2, 3])]
    assert "decoder.layers.1.mlp" in data["stages"][0]["names"] and "decoder.layers.2.mlp" in data["stages"][1]["names"]
    assert [(r["tp"], r["pp"], r["layers"]) for r in data["ranks"]] == [
        (0, 0, [0, 1]),
        (1, 0, [0, 1]),
        (0, 1, [2, 3]),
        (1, 1, [2, 3]),
    ]
    module = data["sites"]["modules"]["decoder.layers.0.mlp.linear_fc1"]
    assert module["class"] == "ColumnParallelLinear"
    assert "mlp.py" in data["sites"]["frames"][module["stack"][0]]


@pytest.mark.parametrize(
    ("name", "golden", "tone", "headline"),
    [
        ("healthy", "", "good", "Healthy as far as recorded"),
        ("healthy", "golden", "good", "Agrees with the golden run"),
        ("overflow", "", "bad", "Non-finite (Inf) since step 3 in decoder.layers.2.pre_mlp_layernorm"),
        ("diverged", "golden", "bad", "Diverged at step 2 in decoder.layers.1.self_attention.core_attention"),
        ("torn", "", "bad", "Replicas disagree since step 0: decoder.layers.1.input_layernorm.weight"),
    ],
)
def test_verdicts(pages, name, golden, tone, headline):
    verdict = pages.data(name, golden)["verdict"]
    assert (verdict["tone"], verdict["headline"]) == (tone, headline)


def test_a_tensor_without_a_finite_element_has_no_norm(pages):
    shown = entry(pages.data("overflow"), "activation", "decoder.layers.3", "output")
    held = [
        row
        for row in rows(pages.run("overflow"), 4)
        if (row["kind"], row["name"], row["io"]) == ("activation", "decoder.layers.3", "output")
    ]
    whole = sum(row["numel"] for row in held if row["tp"] == 0)
    assert shown["bad"][4] == sum(row["n_nan"] for row in held if row["tp"] == 0) == whole
    assert shown["norm"][4] is None and shown["norm"][0] > 0


def test_flow_ends_agreement_with_the_first_divergence(pages):
    flow = pages.data("diverged", "golden")["versus"]["flow"]
    at = next(i for i, stop in enumerate(flow) if stop["first"])
    assert {stop["state"] for stop in flow[:at]} == {"agree"} and flow[at]["state"] == "diverged"
    run = [
        row
        for row in rows(pages.run("diverged"), flow[at]["step"])
        if all(row[key] == flow[at][key] for key in ("name", "io", "path", "kind", "microbatch"))
    ]
    assert flow[at]["run"]["norm"] == pytest.approx(np.sqrt(sum(row["sumsq"] for row in run)), rel=1e-4)


def test_settings_that_differ_are_grouped_by_effect(pages):
    found = {entry["name"]: entry["effect"] for entry in pages.data("diverged", "golden")["versus"]["setup"]}
    assert found["tensor_model_parallel_size"] == "layout" and found["$WORLD_SIZE"] == "none"
    assert not any(name.startswith("msprobe_") for name in found)


def test_a_page_of_four_layers_and_a_hundred_steps_is_small(pages, tmp_path):
    source, run = pages.run("healthy"), tmp_path / "long"
    (run / "ranks").mkdir(parents=True)
    (run / "run.json").write_bytes((source / "run.json").read_bytes())
    for file in (source / "ranks").glob("*.json"):
        (run / "ranks" / file.name).write_bytes(file.read_bytes())
    random = np.random.default_rng(0)
    for rank in range(4):
        table = pq.read_table(source / f"step_000001/rank_{rank:05d}/records.parquet")
        for step in range(100):
            folder = run / f"step_{step:06d}" / f"rank_{rank:05d}"
            folder.mkdir(parents=True)
            changed = table.set_column(0, table.schema.field("step"), pa.array([step] * len(table), pa.int64()))
            for name in ("min", "max", "sum", "sumsq", "absmax"):
                values = np.array(table[name].to_pylist(), float) * random.uniform(0.5, 2)
                index = changed.schema.get_field_index(name)
                changed = changed.set_column(index, changed.schema.field(name), pa.array(values))
            pq.write_table(changed, folder / "records.parquet")
    text = page(page_data(open_run(run)))
    assert 500_000 < len(text.encode()) < 5_000_000


def test_beyond_the_budget_steps_are_thinned_then_names_left_out_and_it_is_said(pages):
    view = open_view(open_run(pages.run("healthy")))
    few = series(view, {3}, cells=60)
    assert few["steps"] == view.run.steps  # never below sixteen steps
    assert len(few["tensors"]) == 60 // len(few["steps"])
    assert f"{len(few['tensors'])} of " in few["notes"][0]
    parts = shards(view, [3], rows=100)
    assert "of 4 ranks" in parts["notes"][0]
    assert {row[1] for held in parts["rows"].values() for row in held} == {0, 1}


def test_thinned_keeps_ends_and_important_steps():
    steps = list(range(0, 1000, 7))
    kept = thinned(steps, 10, {49})
    assert {0, 49, steps[-1]} <= set(kept) and len(kept) <= 13 and kept == sorted(kept)
    assert thinned([3, 5], 10, set()) == [3, 5]


def test_packed_and_short():
    assert packed([2, 2]) == 2 and packed([2, 3]) == [2, 3] and packed([]) == []
    assert short(float("nan")) is None and short(None) is None and short(1 / 3) == 0.333333


@pytest.mark.parametrize("name", ["</script><b>", "<!--", "a\u2028b\u2029c", "&lt;", '"\\', "\ud800", "名前"])
def test_embedded_data_is_read_back_and_holds_no_markup(name):
    text = embedded_json({"name": name, "value": [float("nan"), float("inf"), 1.5, None, True]})
    assert not re.search(r"[<>&\u2028\u2029]", text)
    back = json.loads(text)
    assert back["value"] == [None, None, 1.5, None, True]
    assert back["name"] == name.encode("utf-8", "replace").decode("utf-8")


def test_a_page_asks_nobody_for_anything(pages):
    text = page(pages.data("healthy"))
    script = text[text.rindex("<script>") + 8 : text.rindex("</script>")]
    style = text[text.index("<style>") + 7 : text.index("</style>")]
    assert policy(script, style) in text
    assert "default-src 'none'" in text
    assert not re.search(
        r"""(src|href)\s*=|url\(|@import|fetch\(|XMLHttpRequest|innerHTML|eval\(""", text.split("<body>")[0] + script
    )


def test_command_writes_the_page_and_says_the_verdict(pages, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["report", str(pages.run("healthy")), "--out", str(out)]) == 0
    assert "Healthy" in capsys.readouterr().out and out.read_text().startswith("<!doctype html>")
    assert main(["report", str(pages.run("overflow")), "--out", str(out), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (
        said["verdict"]["headline"].startswith("Non-finite (Inf) since step 3 in ")
        and said["bytes"] == out.stat().st_size
    )


def test_command_says_what_it_cannot_do(pages, tmp_path, capsys):
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "not a directory" in capsys.readouterr().err
    assert main(["report", str(pages.run("healthy")), "--out", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    with pytest.raises(OutputError, match="cannot be written"):
        write_whole(tmp_path / "no" / "such" / "file", b"")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_of_a_file_follows_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "page.html", b"x")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == mode
