"""Rows in, rows out: nothing lost, nothing bent, whatever the names look like."""

import json
import math
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.run_directory.schema import Row, arrow_schema
from msprobe_megatron.run_directory.table import build_table
from tests.unit.job.record.samples import IDENTITY, row

UGLY = [
    "../../etc/passwd",
    "/abs/name",
    "x" * 4096,
    "层.0.注意力.権重 — 🧪",
    "",
    "a\nb\tc\"d'e\\f",
    "decoder.layers.0.self_attention..linear_qkv",
    "C:\\model;DROP TABLE records;--",
]


def ugly_rows() -> tuple[list[Row], np.ndarray, np.ndarray]:
    rows = [
        row(
            k,
            slot=k if k % 3 else -1,
            microbatch=None if k % 2 else k,
            vpp=None if k == 1 else k,
            name=name,
            io=name,
            path=name,
            op=name,
            shard=name,
            site=-1 if k % 2 else 2**31 - 1,
            shape=(0,) * k if k % 2 else (3 * 2**31, 1),
            global_shape=None if k == 2 else (2**40,),
            numel=3 * 2**31,
            extra=None if k == 0 else json.dumps({"text": name}),
            digest=None if k == 0 else 2**64 - 1 - k,
            sketch=None if k == 0 else (0.5, -1.25),
            tensor=None if k == 0 else name,
        )
        for k, name in enumerate(UGLY)
    ]
    rng = np.random.default_rng(0)
    return rows, rng.normal(size=(len(UGLY), 5)), rng.integers(0, 2**60, size=(len(UGLY), 4))


def test_round_trip_of_ugly_rows(tmp_path: Path) -> None:
    rows, floats, counts = ugly_rows()
    directory = RunDirectory.create(tmp_path / "run")
    size = directory.write_table("t.parquet", build_table(123_456_789_012, rows, floats, counts, IDENTITY))
    file = tmp_path / "run" / "t.parquet"
    assert file.stat().st_size == size
    table = pq.read_table(file)
    assert table.schema.equals(arrow_schema()) and table.schema.metadata[b"version"] == b"1"
    for source, k, found in zip(rows, range(len(rows)), table.to_pylist(), strict=True):
        want = source._asdict()
        slot = want.pop("slot")
        want["site"] = None if want["site"] < 0 else want["site"]
        want |= {"step": 123_456_789_012, **IDENTITY}
        for names, figures in (
            (("min", "max", "sum", "sumsq", "absmax"), floats),
            (("n_nan", "n_posinf"), counts),
        ):
            want |= {name: figures[k, i].item() if slot >= 0 else None for i, name in enumerate(names)}
        for name in ("shape", "global_shape", "sketch"):
            want[name] = None if want[name] is None else list(want[name])
        assert {name: found[name] for name in want} == want


def test_only_the_named_file_appears(tmp_path: Path) -> None:
    rows, floats, counts = ugly_rows()
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_table("step_000010/rank_00003/records.parquet", build_table(1, rows, floats, counts, IDENTITY))
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()]
    assert files == ["run/step_000010/rank_00003/records.parquet"]


def test_a_query_sees_it(tmp_path: Path) -> None:
    rows, floats, counts = ugly_rows()
    RunDirectory.create(tmp_path).write_table("t.parquet", build_table(7, rows, floats, counts, IDENTITY))
    answer = duckdb.sql(
        f"select count(*), count(sum), sum(sum), max(len(name)), max(shape[1]) from '{tmp_path}/t.parquet'"
    ).fetchall()
    measured = [k for k in range(len(rows)) if k % 3]
    (found,) = answer
    assert found[:2] == (len(rows), len(measured))
    assert found[2] == pytest.approx(floats[measured, 2].sum())
    assert found[3:] == (4096, 3 * 2**31)


def test_neutral_and_unfilled_figures_become_null() -> None:
    inf, nan = math.inf, math.nan
    floats = np.array([[inf, -inf, 0.0, 0.0, -inf], [nan] * 5, [1.0, 2.0, 3.0, inf, 2.0]])
    counts = np.array([[4, 0, 0, 0], [-1] * 4, [0, 1, 2, 3]])
    table = build_table(1, [row(k, slot=k) for k in (0, 1, 2, -1)], floats, counts, IDENTITY)
    figures = table.select(["min", "max", "sum", "sumsq", "absmax", "n_nan", "n_zero"]).to_pylist()
    assert [list(line.values()) for line in figures] == [
        [None, None, 0.0, 0.0, None, 4, 0],
        [None] * 7,
        [1.0, 2.0, 3.0, None, 2.0, 0, 3],
        [None] * 7,
    ]


def test_rows_may_share_a_slot_and_come_in_any_order() -> None:
    floats, counts = np.arange(15.0).reshape(3, 5), np.arange(12).reshape(3, 4)
    table = build_table(1, [row(k, slot=s) for k, s in enumerate((2, 0, 2, 1))], floats, counts, IDENTITY)
    assert table["sum"].to_pylist() == [12.0, 2.0, 12.0, 7.0]
    assert table["n_zero"].to_pylist() == [11, 3, 11, 7]


def test_a_slot_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(IndexError, match="slot 3 of a row is not among the 3"):
        build_table(1, [row(slot=3)], np.zeros((3, 5)), np.zeros((3, 4), np.int64), IDENTITY)


def test_no_rows() -> None:
    table = build_table(1, [], np.empty((0, 5)), np.empty((0, 4), np.int64), IDENTITY)
    assert table.num_rows == 0 and table.schema.equals(arrow_schema(), check_metadata=True)


def test_rows_without_any_slot() -> None:
    table = build_table(1, [row(), row(1)], np.empty((0, 5)), np.empty((0, 4), np.int64), IDENTITY)
    assert table["sum"].null_count == 2


def test_a_name_that_is_not_unicode_loses_no_row() -> None:
    rows = [row(name="bad\udc80name", extra="{}"), row(1, name="good")]
    table = build_table(1, rows, np.empty((0, 5)), np.empty((0, 4), np.int64), IDENTITY)
    assert table["name"].to_pylist() == ["bad\\udc80name", "good"]
