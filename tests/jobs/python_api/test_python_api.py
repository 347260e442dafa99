"""Runs from Python: against the losses the job logged, the rows read with pyarrow alone, and the other layout."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

import msprobe_megatron as mp
from msprobe_megatron.analysis.load.run import RunError
from tests.support.demo_runs import demo_run

PAGE = Path(__file__).resolve().parents[3] / "docs/python.md"
PROBE = "steps: [0, 1]\ndump: {level: L0, task: tensor}\n"
FLAGS = "--num-layers 2 --train-iters 2 --micro-batch-size 1 --global-batch-size 4 --save-losses {}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("python_api")
    demo_run(place, PROBE, FLAGS.format(place / "one.jsonl"), name="one_card")
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel"
    demo_run(place, PROBE, f"{FLAGS.format(place / 'two.jsonl')} {tensor}", world=2, name="tp2")
    parallel = f"{tensor} --use-distributed-optimizer"
    demo_run(place, PROBE, f"{FLAGS.format(place / 'four.jsonl')} {parallel}", world=4, name="tp2_dp2")
    return place


@pytest.fixture(scope="module")
def runs(folder):
    return {name: mp.load(folder / name) for name in ("one_card", "tp2", "tp2_dp2")}


@pytest.mark.parametrize(("name", "log"), [("one_card", "one"), ("tp2", "two"), ("tp2_dp2", "four")])
def test_the_loss_is_the_one_that_was_logged(folder, runs, name, log):
    logged = [json.loads(line)["loss"] for line in (folder / f"{log}.jsonl").read_text().splitlines()]
    assert runs[name].loss.steps.tolist() == [0, 1]
    assert np.allclose(runs[name].loss.values, logged, rtol=1e-6)
    assert np.array_equal(runs[name].series("lm loss").values, runs[name].loss.values)


@pytest.mark.parametrize("name", ["decoder.layers.1.mlp", "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0"])
def test_a_series_is_that_of_the_whole_tensor_in_every_layout(folder, runs, name):
    squares, largest = np.zeros(2), np.zeros(2)
    for step in (0, 1):
        rows = pq.read_table(folder / f"one_card/step_{step:06d}/rank_00000/records.parquet").to_pylist()
        kind = "parameter" if name.endswith("weight") else "activation"
        chosen = [
            row for row in rows if row["name"] == name and row["kind"] == kind and row["io"] in ("output", "weight")
        ]
        if kind == "activation":
            chosen = [row for row in chosen if row["path"] == "0"] or chosen
        squares[step] = sum(row["sumsq"] for row in chosen)
        largest[step] = max(row["absmax"] for row in chosen)
    path = {"path": "0"} if name == "decoder.layers.1.mlp" else {}
    for run in runs.values():
        assert np.allclose(run.series(name, "norm", **path).values, np.sqrt(squares), rtol=1e-5)
        assert np.allclose(run.series(name, "absmax", **path).values, largest, rtol=1e-5)


def test_a_tensor_is_whole_over_its_shards(folder, runs):
    """The TP2 weight by hand from its two files, and every layout beside the single one."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    halves = []
    for rank in (0, 1):
        place = folder / f"tp2/step_000000/rank_{rank:05d}"
        rows = pq.read_table(place / "records.parquet").to_pylist()
        (key,) = {row["tensor"] for row in rows if row["name"] == name and row["kind"] == "parameter"}
        (found,) = [pack[key] for pack in map(load_file, place.glob("*.safetensors")) if key in pack]
        halves.append(found)
    assert np.array_equal(runs["tp2"].tensor(name, 0), np.concatenate(halves))
    assert np.array_equal(runs["one_card"].tensor(name, 0), np.concatenate(halves))
    whole = runs["one_card"].tensor(name, 0, kind="grad_reduced")
    # With the distributed optimizer each rank holds a range of elements.
    for layout in ("tp2", "tp2_dp2"):
        assert np.allclose(runs[layout].tensor(name, 0, kind="grad_reduced"), whole, atol=1e-6)
    # Microbatch 0 of two data-parallel ranks is microbatches 0 and 1 of one.
    hidden = [runs["one_card"].tensor("decoder.layers.1", 1, microbatch=number) for number in (0, 1)]
    assert np.allclose(runs["tp2_dp2"].tensor("decoder.layers.1", 1), np.concatenate(hidden, axis=1), atol=1e-4)
    assert runs["one_card"].tensor("model", 0, io="input", path="input_ids").dtype == np.int64


def test_what_is_not_there_is_named(runs):
    run = runs["tp2"]
    for call, said in [
        (lambda: run.series("decoder.layer.1"), r"did you mean decoder.layers.1\?"),
        (lambda: run.series("decoder.layers.1", "nrom"), r"did you mean norm\?.*accepted: absmax"),
        (lambda: run.series("decoder.layers.1", kind="loss"), "accepted: activation input"),
        (lambda: run.tensor("decoder.layers.1", 0, microbatch=4), "no microbatch 4 in step 0; accepted: 0 to 3"),
        (lambda: run.rows(step=7), "recorded steps: .0, 1."),
        (lambda: run.rows(form="panda"), r"did you mean pandas\?"),
        (lambda: mp.load("/no/such/run"), "not a directory"),
    ]:
        with pytest.raises(RunError, match=said):
            call()


def test_rows_are_those_of_the_files_and_values_are_never_sql(folder, runs):
    files = sorted((folder / "tp2").glob("step_*/rank_*/records.parquet"))
    count = sum(pq.read_metadata(file).num_rows for file in files)
    rows = runs["tp2"].rows(form="arrow")
    assert rows.num_rows == count
    first = rows.slice(0, 50).to_pylist()
    assert all(row["norm"] is None or np.isclose(row["norm"], row["sumsq"] ** 0.5) for row in first)
    assert set(runs["tp2"].rows(kind="loss", step=1, rank=1, form="arrow").column("rank").to_pylist()) == {1}
    assert runs["tp2"].rows(name="x' or '1' = '1", form="arrow").num_rows == 0


def test_a_run_shows_itself(folder, runs):
    assert "2 steps 0-1, 2 ranks, tp2" in repr(runs["tp2"])
    assert "<th>layout</th><td>tp 2" in runs["tp2"]._repr_html_()
    assert repr(runs["tp2"].loss).startswith("Series of 2 steps (0: ")


def test_several_runs_beside_one_golden_run(folder, capsys):
    from msprobe_megatron.cli import main

    paths = [str(folder / name) for name in ("one_card", "tp2", "tp2_dp2")]
    assert main(["compare", *paths]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"golden run: {paths[0]}" and len([line for line in lines if " agree " in line]) >= 2
    assert main(["compare", *paths, "--json", "--out", str(folder / "compared")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [result["run"] for result in found["results"]] == paths[1:]
    assert (folder / "compared/1_tp2_dp2/compare.json").is_file()


def test_the_page_runs_as_it_is_and_without_torch(folder):
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
    assert "mp.compare(" in code
    blocked = f"import sys\nsys.modules['torch'] = None\n{code}"
    done = subprocess.run([sys.executable, "-c", blocked], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "<run tp2: 2 steps 0-1, 2 ranks" in done.stdout and "agree" in done.stdout
