"""msprobe's layout: numbers by hand, there and back, and the published tools as judges."""

import csv
import json
import math
import re
import sqlite3
import textwrap

import numpy as np
import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.report.msprobe.export import export_msprobe
from msprobe_megatron.report.msprobe.importer import MsprobeFormatError, import_msprobe
from msprobe_megatron.report.msprobe.records import tensor_record
from tests.support.forked import run_forked
from tests.unit.report.msprobe.peer import call

_JOB = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --global-batch-size 2"
    " --train-iters 1 --lr 1e-2 --vocab-size 32 --attention-dropout 0 --hidden-dropout 0"
)


def train(argv):
    from msprobe_megatron.lab.demo.pretrain_gpt import run

    run(argv)
    return {}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the same training."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "probe.yaml").write_text("dump: {level: L0}\n")
    paths = [folder / "first", folder / "second"]
    for path in paths:
        argv = f"{_JOB} --msprobe-config {folder}/probe.yaml --msprobe-output {path}".split()
        run_forked(1, train, argv)
    return [open_run(path) for path in paths]


def data_of(folder, step=0, rank=0):
    return json.loads((folder / f"step{step}" / f"rank{rank}" / "dump.json").read_text())["data"]


def test_records_hold_the_numbers_of_the_rows(runs, tmp_path):
    export_msprobe(runs[0], tmp_path / "out")
    data = data_of(tmp_path / "out")
    checked = 0
    for row in pq.read_table(runs[0].files[0][2]).to_pylist():
        if row["kind"] != "activation" or row["io"] != "output" or row["dtype"] != "float32":
            continue
        entry = data[f"Module.{row['name']}.{row['op']}.forward.{row['microbatch']}"]
        record = entry["output"][int(row["path"] or 0)]
        assert record["shape"] == row["shape"]
        assert record["Max"] == row["max"]
        assert np.isclose(record["Mean"], np.float64(row["sum"]) / np.prod(row["shape"]))
        assert np.isclose(record["Norm"], np.sqrt(np.float64(row["sumsq"])))
        checked += 1
    assert checked > 20
    weights = data["Module.decoder.layers.1.mlp.linear_fc1.ColumnParallelLinear.forward.0"]["parameters"]
    assert set(weights) == {"weight", "bias"}
    gradient = data["Module.decoder.layers.1.mlp.linear_fc1.ColumnParallelLinear.parameters_grad.0"]
    assert gradient["weight"][0]["Norm"] > 0


def test_parents_and_stacks(runs, tmp_path):
    export_msprobe(runs[0], tmp_path / "out")
    folder = tmp_path / "out" / "step0" / "rank0"
    construct = json.loads((folder / "construct.json").read_text())
    child = "Module.decoder.layers.0.mlp.linear_fc1.ColumnParallelLinear.forward.1"
    assert construct[child] == ["Module.decoder.layers.0.mlp.MLP.forward.1", 1]
    assert construct["Module.model.GPTModel.forward.0"] == [None, 0]
    assert construct["megatron_micro_step_number"] == 1
    stacks = json.loads((folder / "stack.json").read_text())
    frames = next(frames for names, frames in stacks.values() if child in names)
    assert frames[0].startswith("File ")
    assert "mlp.py" in frames[0]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"n_nan": 1, "n_posinf": 1}, (math.nan, math.nan, math.nan, math.nan)),
        ({"n_posinf": 2}, (math.inf, -1.0, math.inf, math.inf)),
        ({"n_neginf": 2}, (3.0, -math.inf, -math.inf, math.inf)),
        ({"n_neginf": 2, "n_posinf": 1}, (math.inf, -math.inf, math.nan, math.inf)),
        ({}, (3.0, -1.0, 0.5, 4.0)),
    ],
)
def test_non_finite_values_in_msprobes_words(counts, expected):
    row = {"dtype": "float32", "shape": [4], "numel": 4, "min": -1.0, "max": 3.0, "sum": 2.0, "sumsq": 16.0}
    row |= {"n_nan": 0, "n_posinf": 0, "n_neginf": 0, "digest": None} | counts
    record = tensor_record(row, requires_grad=False)
    got = tuple(record[key] for key in ("Max", "Min", "Mean", "Norm"))
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(got, expected, strict=True)), got


def test_by_command(runs, tmp_path, capsys):
    from msprobe_megatron.cli import main

    assert main(["export", str(runs[0].path), "--format", "msprobe", "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dumps"] == ["step0/rank0"]
    assert main(["import", str(tmp_path / "out"), "--out", str(tmp_path / "back"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == len(open_run(tmp_path / "back").rows())
    assert main(["import", str(tmp_path / "nothing"), "--out", str(tmp_path / "again")]) == 2
    assert "dump.json" in capsys.readouterr().err


def test_there_and_back_keeps_what_msprobe_can_hold(runs, tmp_path):
    export_msprobe(runs[0], tmp_path / "out")
    counts = import_msprobe(tmp_path / "out", tmp_path / "back")
    back = open_run(tmp_path / "back")
    assert counts["steps"] == 1
    columns = "kind, microbatch, name, io, max, min, numel"
    kinds = "kind in ('activation', 'parameter', 'grad_reduced')"
    there = runs[0].rows().filter(kinds)
    here = back.rows().filter(kinds)
    assert sorted(there.project(columns).fetchall(), key=str) == sorted(here.project(columns).fetchall(), key=str)
    norms = dict(there.filter("kind = 'parameter'").project("name, sqrt(sumsq)").fetchall())
    for name, norm in here.filter("kind = 'parameter'").project("name, sqrt(sumsq)").fetchall():
        assert math.isclose(norm, norms[name], rel_tol=1e-12)


@pytest.mark.parametrize("content", ["{", "[]", '{"data": 3}'])
def test_what_is_no_dump_is_refused(tmp_path, content):
    folder = tmp_path / "in" / "step0" / "rank0"
    folder.mkdir(parents=True)
    (folder / "dump.json").write_text(content)
    with pytest.raises(MsprobeFormatError, match=r"dump\.json"):
        import_msprobe(tmp_path / "in", tmp_path / "out")
    with pytest.raises(MsprobeFormatError, match="no step"):
        import_msprobe(tmp_path / "nothing", tmp_path / "out2")


def test_the_published_compare_matches_every_row_of_two_equal_runs(runs, peer, tmp_path):
    for run, name in zip(runs, ("a", "b"), strict=True):
        export_msprobe(run, tmp_path / name)
    target, golden = (str(tmp_path / name / "step0" / "rank0" / "dump.json") for name in ("a", "b"))
    call(peer, "msprobe", "compare", "-tp", target, "-gp", golden, "-o", str(tmp_path / "result"))
    (table,) = (tmp_path / "result").glob("compare_result*.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 100
    assert [row["NPU Name"] for row in rows if row["Bench Name"] in ("", "N/A")] == []
    assert {row["Result"] for row in rows} == {"pass"}


def test_the_published_graph_visualize_builds_its_database(runs, peer, tmp_path):
    export_msprobe(runs[0], tmp_path / "a")
    call(peer, "msprobe", "graph_visualize", "-tp", str(tmp_path / "a" / "step0" / "rank0"), "-o", str(tmp_path / "g"))
    (database,) = (tmp_path / "g").glob("*.vis.db")
    with sqlite3.connect(database) as connection:
        names = {name for (name,) in connection.execute("select node_name from tb_nodes")}
    assert any("decoder.layers.1.mlp.linear_fc1" in name for name in names)


_THEIRS = """
import sys, torch
from msprobe.pytorch import PrecisionDebugger

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
debugger = PrecisionDebugger(config_path=sys.argv[1])
x = torch.randn(5, 8)
debugger.start(model=model)
y = model(x)
y.square().mean().backward()
debugger.stop()
debugger.step()
print("OUT", float(y.max()), float(y.min()), float(y.norm()))
"""


def test_a_dump_made_by_the_published_msprobe_is_read(peer, tmp_path):
    config = {"task": "statistics", "dump_path": str(tmp_path / "theirs"), "rank": [], "step": [], "level": "L0"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "statistics": {"scope": [], "list": []}}))
    (tmp_path / "model.py").write_text(textwrap.dedent(_THEIRS))
    printed = call(peer, "python", "model.py", str(tmp_path / "config.json"), cwd=tmp_path)
    high, low, norm = (float(word) for word in re.search(r"^OUT (\S+) (\S+) (\S+)$", printed, re.M).groups())
    for folder in (tmp_path / "theirs").glob("step*/proc*"):
        folder.rename(folder.parent / "rank0")  # one process without a group: msprobe names it by its pid
    import_msprobe(tmp_path / "theirs", tmp_path / "ours")
    rows = open_run(tmp_path / "ours").rows()
    (found,) = (
        rows.filter("kind = 'activation' and io = 'output' and op = 'Linear' and list_last(shape) = 4")
        .project("max, min, sqrt(sumsq)")
        .fetchall()
    )
    assert np.allclose(found, (high, low, norm), rtol=1e-5)
    assert rows.filter("kind = 'gradient'").fetchall()
    assert rows.filter("kind = 'parameter'").fetchall()


def record_everything(folder):
    """Two equal runs of a small net at mix with whole tensors, and variables saved by hand."""
    import torch

    from msprobe_megatron import attach, save
    from msprobe_megatron.config import Overrides, from_document

    config = {"dump": {"level": "mix", "task": "tensor", "apis": "all"}}
    paths = []
    for name in ("left", "right"):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(model, optimizer, from_document(config, "here", Overrides(output=folder / name))):
            hidden = model(torch.randn(3, 4, dtype=torch.bfloat16))
            save({"hidden": hidden, "both": [hidden * 2, 0.5]}, "head")
            torch.cat([hidden, hidden]).float().sum().backward()
            optimizer.step()
        paths.append(folder / name)
    return paths


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("everything")
    runs = [open_run(path) for path in record_everything(folder)]
    for run, name in zip(runs, ("a", "b"), strict=True):
        export_msprobe(run, folder / name)
    return folder, runs[0]


def test_calls_have_msprobes_names_and_numbers(everything):
    folder, _ = everything
    data = data_of(folder / "a")
    for name in ("Functional.linear.0.forward", "Functional.linear.1.forward", "Functional.gelu.0.backward"):
        assert name in data
    linear = data["Functional.linear.1.forward"]
    assert [record["shape"] for record in linear["input_args"]] == [[3, 8], [2, 8], [2]]
    assert data["Torch.cat.0.forward"]["input_args"][0][1]["shape"] == [3, 2]
    backward = data["Functional.linear.1.backward"]
    assert sorted(record["shape"] for record in backward["output"]) == [[2], [2, 8], [3, 8]]
    construct = json.loads((folder / "a/step0/rank0/construct.json").read_text())
    assert construct["Functional.linear.1.forward"] == ["Module.2.Linear.forward.0", 0]
    header = json.loads((folder / "a/step0/rank0/dump.json").read_text())
    assert (header["task"], header["level"]) == ("tensor", "mix")


def test_the_kits_own_copies_are_no_calls_of_the_model(everything):
    """Copies into the buffer of a pack are operations too; none of them may be seen, nor may its bytes be saved."""
    from safetensors import safe_open

    folder, run = everything
    assert run.rows().filter("dtype = 'uint8'").fetchall() == []
    packs = sorted(folder.glob("left/step_*/rank_*/*.safetensors"))
    saved = 0
    for pack in packs:
        with safe_open(pack, "pt") as opened:  # refuses a file with holes
            saved += len(list(opened.keys()))
    (keys,) = run.rows().filter("tensor is not null").aggregate("count(distinct tensor)").fetchall()[0]
    assert saved == keys > 20


def test_tensors_are_files_of_torch_with_the_bytes_of_the_run(everything):
    import torch

    folder, run = everything
    record = data_of(folder / "a")["Functional.linear.0.forward"]["output"][0]
    loaded = torch.load(folder / "a/step0/rank0/dump_tensor_data" / record["data_name"], weights_only=True)
    assert loaded.dtype == torch.bfloat16 and list(loaded.shape) == record["shape"] == [3, 8]
    (total,) = (
        run.rows().filter("name = '0/torch.nn.functional.linear.0' and io = 'output' and kind = 'activation'")
        .project("sum").fetchall()[0]
    )  # fmt: skip
    assert loaded.double().sum().item() == pytest.approx(total)
    names = {path.name for path in (folder / "a/step0/rank0/dump_tensor_data").iterdir()}
    assert "Functional.linear.0.forward.output.0.pt" in names


def test_what_was_saved_by_hand_is_debug_json(everything):
    folder, _ = everything
    content = json.loads((folder / "a/step0/rank0/debug.json").read_text())
    assert content["level"] == "debug"
    head, gradient = content["data"]["head.0.debug"], content["data"]["head_grad.0.debug"]
    assert head["hidden"]["shape"] == head["both"][0]["shape"] == gradient["hidden"]["shape"] == [3, 2]
    assert head["both"][1]["dtype"] == "torch.float64"
    assert not any("debug" in name for name in data_of(folder / "a"))


@pytest.mark.parametrize("file", ["dump.json", "debug.json"])
def test_the_published_compare_reads_tensors_calls_and_saved_variables(everything, peer, tmp_path, file):
    folder, _ = everything
    target, golden = (str(folder / name / "step0" / "rank0" / file) for name in ("a", "b"))
    call(peer, "msprobe", "compare", "-tp", target, "-gp", golden, "-o", str(tmp_path / "result"))
    (table,) = (tmp_path / "result").glob("*compare_result*.csv")
    with table.open() as opened:
        rows = list(csv.DictReader(opened))
    assert rows and [row["NPU Name"] for row in rows if row["Bench Name"] in ("", "N/A")] == []
    assert {row["Result"] for row in rows} == {"pass"}
    odd = [row for row in rows if row["MaxAbsErr"] not in ("N/A", "unsupported", "") and float(row["MaxAbsErr"]) != 0]
    assert odd == []
    assert any(row["MaxAbsErr"] in ("0", "0.0") for row in rows)
