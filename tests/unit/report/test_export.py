"""Exports are read back with readers that share no code with the writers: csv, a small event parser, sqlite3."""

import csv
import json
import sqlite3
import struct

import numpy as np
import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.exports.trend import tags_of
from msprobe_megatron.cli import main
from msprobe_megatron.report.files.csv_table import csv_chunks
from msprobe_megatron.run_directory.encoders.tensorboard_events import crc32c, event_chunks

NAME = "decoder.layers.2.pre_mlp_layernorm"


def rows(run, step, rank):
    return pq.read_table(run / f"step_{step:06d}/rank_{rank:05d}/records.parquet").to_pylist()


def export(pages, out, format, run="overflow", *more):
    assert main(["export", str(pages.run(run)), "--format", format, "--out", str(out), *more]) == 0
    return out


def test_csv_holds_every_merged_tensor(pages, tmp_path):
    with export(pages, tmp_path / "t.csv", "csv", "golden").open(newline="") as file:
        table = list(csv.DictReader(file))
    held = [row for step in range(5) for row in rows(pages.run("golden"), step, 0)]
    assert len(table) == len(held)
    wanted = next(row for row in held if row["name"] == NAME and row["io"] == "output" and row["step"] == 3)
    found = [r for r in table if r["name"] == NAME and r["io"] == "output" and r["kind"] == wanted["kind"]]
    found = next(r for r in found if r["step"] == "3" and r["microbatch"] == str(wanted["microbatch"]))
    assert float(found["norm"]) == pytest.approx(np.sqrt(wanted["sumsq"]), rel=1e-12)
    assert float(found["mean"]) == pytest.approx(wanted["sum"] / wanted["numel"], rel=1e-12)


def test_csv_by_rank_holds_every_row(pages, tmp_path):
    with export(pages, tmp_path / "r.csv", "csv", "overflow", "--by-rank").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == sum(len(rows(pages.run("overflow"), s, r)) for s in range(5) for r in range(4))
    bad = [row for row in table if row["name"] == NAME and row["io"] == "output" and row["n_posinf"] == "1"]
    assert {(row["step"], row["rank"], row["microbatch"]) for row in bad} == {("3", "2", "0"), ("3", "3", "0")}


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx"])
def test_names_that_look_like_formulas_stay_names(name):
    text = b"".join(csv_chunks(("step", "name", "value"), [(0, name, -1.5), (1, "a,b\n", None)])).decode()
    back = list(csv.reader(text.splitlines(keepends=True)))
    assert back[1] == ["0", f"'{name}", "-1.5"]
    assert back[2] == ["1", "a,b\n", ""]


def fields(message):
    """Fields of a protocol buffer message: number and value, by wire type."""
    at = 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
        elif key & 7 == 1:
            yield key >> 3, struct.unpack("<d", message[at : at + 8])[0]
            at += 8
        elif key & 7 == 5:
            yield key >> 3, struct.unpack("<f", message[at : at + 4])[0]
            at += 4
        else:
            size = number()
            yield key >> 3, message[at : at + size]
            at += size


def read_events(data):
    """(step, tag, value) of an event file, checksums tested."""
    at, found, first = 0, [], True
    while at < len(data):
        (size,) = struct.unpack("<Q", data[at : at + 8])
        message = data[at + 12 : at + 12 + size]
        for part, place in ((data[at : at + 8], at + 8), (message, at + 12 + size)):
            (masked,) = struct.unpack("<I", data[place : place + 4])
            rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
            assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == crc32c(part)
        at += size + 16
        event = dict(fields(message))
        if first:
            assert event[3] == b"brain.Event:2"
            first = False
            continue
        for _, value in fields(event[5]):
            entry = dict(fields(value))
            found.append((event.get(2, 0), entry[1].decode(), entry[2]))
    return found


@pytest.mark.parametrize(
    ("data", "expected"),
    # The vectors of RFC 3720 B.4 and the check value of the polynomial.
    [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)],
)
def test_checksum(data, expected):
    assert crc32c(data) == expected


def test_event_file_of_a_run(pages, tmp_path):
    (file,) = export(pages, tmp_path / "tb", "tensorboard").glob("events.out.tfevents.*")
    found = {(step, tag): value for step, tag, value in read_events(file.read_bytes())}
    assert {step for step, _ in found} == set(range(5))
    assert [found[s, f"activation/{NAME}/output/non_finite"] for s in range(5)] == [0, 0, 0, 1, 4 * 32 * 2 * 64]
    held = [r for r in rows(pages.run("overflow"), 1, 2) if r["name"] == NAME and r["kind"] == "activation"]
    norm = np.sqrt(sum(r["sumsq"] for r in held if r["io"] == "output"))
    assert found[1, f"activation/{NAME}/output/norm"] == pytest.approx(norm, rel=1e-6)


def test_events_of_many_values_and_of_odd_ones():
    many = [(step, f"tag {i} é", float(i)) for step in (0, 300) for i in range(1203)]
    assert read_events(b"".join(event_chunks(many, 1.5))) == many
    odd = [(0, "big", 1e300), (0, "small", -1e300), (0, "nan", float("nan"))]
    values = [value for _, _, value in read_events(b"".join(event_chunks(odd, 0.0)))]
    assert values[:2] == [float("inf"), float("-inf")] and np.isnan(values[2])


def test_trend_database(pages, tmp_path):
    out = export(pages, tmp_path / "x.trend.db", "trend-db")
    with sqlite3.connect(out) as database:
        metrics = dict(database.execute("select metric_name, metric_id from monitoring_metrics"))
        assert set(metrics) == {"forward", "backward", "parameters_grad", "parameters"}
        (limits,) = database.execute("select max_rank, min_step, max_step, forward from global_stats")
        assert limits == (3, 0, 4, "norm,max,min,mean")
        query = """select norm, max, min, mean from trend_data join monitoring_targets using (target_id)
            where rank = 2 and step = ? and metric_id = ? and target_name = ? and micro_step = 0"""
        (values,) = database.execute(query, (1, metrics["forward"], f"{NAME}.output"))
        (held,) = [
            r
            for r in rows(pages.run("overflow"), 1, 2)
            if (r["name"], r["io"], r["kind"], r["microbatch"]) == (NAME, "output", "activation", 0)
        ]
        expected = (np.sqrt(held["sumsq"]), held["max"], held["min"], held["sum"] / held["numel"])
        assert values == pytest.approx(expected, rel=1e-12)
        (broken,) = database.execute(query, (3, metrics["forward"], f"{NAME}.output"))
        assert broken[:2] == (1e9 + 1, 1e9 + 1)
        tags = """select count(*) from tag_target_mapping join monitoring_tags using (tag_id)
            join monitoring_targets using (target_id)
            where tag_name = 'layers.2' and target_name not like '%layers.2.%'"""
        assert database.execute(tags).fetchone() == (0,)
    assert tags_of("a.layers.3.b") == [("a", "module"), ("layers.3", "layer"), ("b", "module")]


def test_graph_database(pages, tmp_path):
    out = export(pages, tmp_path / "x.vis.db", "vis-db")
    with sqlite3.connect(out) as database:
        database.row_factory = sqlite3.Row
        config = dict(database.execute("select * from tb_config").fetchone())
        assert json.loads(config["rank_list"]) == [0, 1, 2, 3] and json.loads(config["step_list"]) == list(range(5))
        assert config["micro_steps"] == 4 and config["graph_type"] == "build"
        nodes = {
            row["node_name"]: dict(row)
            for row in database.execute("select * from tb_nodes where step = 3 and rank = 2 order by node_order")
        }
        assert next(iter(nodes)) == "DefaultModel" and nodes["DefaultModel"]["up_node"] == ""
        for name, node in nodes.items():
            for child in json.loads(node["sub_nodes"] or "[]"):
                assert nodes[child]["up_node"] == name
            assert name == "DefaultModel" or name in json.loads(nodes[node["up_node"]]["sub_nodes"])
        first = nodes[f"Module.{NAME}.RMSNorm.forward.0"]
        assert first["up_node"] == "Module.decoder.layers.2.TransformerLayer.forward.0"
        assert first["overflow_level"] == "critical"
        assert nodes[f"Module.{NAME}.RMSNorm.forward.1"]["overflow_level"] is None
        assert nodes["Module.decoder.layers.2.mlp.MLP.forward.0"]["overflow_level"] == "high"
        data = json.loads(first["input_data"])[f"Module.{NAME}.RMSNorm.forward.0.input.x"]
        (held,) = [
            r
            for r in rows(pages.run("overflow"), 3, 2)
            if (r["name"], r["io"], r["kind"], r["microbatch"]) == (NAME, "input", "activation", 0)
        ]
        assert float(data["Norm"]) == pytest.approx(np.sqrt(held["sumsq"])) and data["dtype"] == "torch.float32"
        stack = database.execute("select stack_info from tb_stack where id = ?", (first["stack_id"],)).fetchone()
        assert "transformer_layer.py" in json.loads(stack[0])[0]


def test_one_step_alone(pages, tmp_path, capsys):
    with export(pages, tmp_path / "one.csv", "csv", "overflow", "--step", "2").open(newline="") as file:
        assert {row["step"] for row in csv.DictReader(file)} == {"2"}
    assert main(["export", str(pages.run("overflow")), "--format", "csv", "--step", "77"]) == 2
    assert "recorded steps: [0, 1, 2, 3, 4]" in capsys.readouterr().err


def test_refusals(pages, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["export", str(pages.run("overflow")), "--format", "xml"])
    assert main(["export", str(pages.run("overflow")), "--format", "trend-db", "--out", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--format", "csv"]) == 2
    assert not list(tmp_path.iterdir())
