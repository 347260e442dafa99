"""A file that was made from the last step's is, byte for byte, the one that would have been made in full."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msprobe_megatron.job.record.step_files import RecordsFile, encoded
from msprobe_megatron.run_directory.schema import Row
from msprobe_megatron.run_directory.table import build_table
from tests.unit.job.record.samples import IDENTITY, row

ROWS = [row(n, slot=n if n % 5 else -1, name=f"decoder.layers.{n % 7}", tensor=None) for n in range(60)]


def figures(seed: int, empty: tuple[int, ...] = (), nans: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Random figures; `empty` slots have no finite element, `nans` some NaN."""
    random = np.random.default_rng(seed)
    floats, counts = random.normal(size=(60, 5)), random.integers(0, 9, (60, 4))
    counts[:, :3] = 0
    floats[list(empty)] = [np.inf, -np.inf, 0, 0, -np.inf]
    counts[list(nans), 0] = 3
    return floats, counts


def full(step: int, found: tuple[np.ndarray, np.ndarray], digests: np.ndarray | None, complete: bool = True) -> bytes:
    numbered = None if digests is None else (digests, np.empty((60, 0), np.float32))
    table = build_table(step, ROWS, *found, IDENTITY, numbered)
    marks = {**table.schema.metadata, b"complete": b"true" if complete else b"false"}
    return bytes(encoded(table.replace_schema_metadata(marks)))


@pytest.mark.parametrize("digest", [False, True])
def test_same_bytes_as_made_in_full(digest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(
        "msprobe_megatron.job.record.step_files.encoded", lambda table: made.append(1) or encoded(table)
    )
    file = RecordsFile()
    steps = [(), (), (), (), (7,), (7,), (7,), (), ()]
    for step, empty in enumerate(steps):
        digests = np.random.default_rng(step).integers(0, 2**63, 60).astype(np.uint64) if digest else None
        numbered = None if digests is None else (digests, np.empty((60, 0), np.float32))
        found = figures(step, empty, nans=(3,) if step == len(steps) - 1 else ())
        content = file.content(step, list(ROWS), found, numbered, IDENTITY, complete=True)
        assert bytes(content) == full(step, found, digests)
    # Learnt at the second, used for the next two; then nulls change, and at the end a NaN that was not there before.
    assert len(made) == len(steps) - 4


def test_what_was_cut_short_is_marked_so() -> None:
    file = RecordsFile()
    for step in range(5):
        content = file.content(step, list(ROWS), figures(step), None, IDENTITY, complete=step < 4)
        schema = pq.read_schema(pa.BufferReader(bytes(content)))
        assert schema.metadata[b"complete"] == (b"true" if step < 4 else b"false")


def test_other_rows_are_made_anew() -> None:
    file = RecordsFile()
    for step in range(3):
        file.content(step, list(ROWS), figures(step), None, IDENTITY, complete=True)
    others = [*ROWS[:-1], row(59, slot=59, name="another")]
    found = pq.read_table(pa.BufferReader(bytes(file.content(3, others, figures(3), None, IDENTITY, complete=True))))
    assert found["name"].to_pylist()[-1] == "another" and set(found["step"].to_pylist()) == {3}
    assert found["sum"].to_pylist() == [x if n % 5 or n == 59 else None for n, x in enumerate(figures(3)[0][:, 2])]


def test_sketches_and_no_rows_are_tables() -> None:
    file = RecordsFile()
    sketches = (np.zeros(60, np.uint64), np.ones((60, 4), np.float32))
    for step in range(4):
        table = file.content(step, list(ROWS), figures(step), sketches, IDENTITY, complete=True)
        assert isinstance(table, pa.Table) and table["sketch"][1].as_py() == [1.0] * 4
    assert file.content(9, [], figures(0), None, IDENTITY, complete=True).num_rows == 0


def test_columns_are_reused_only_while_rows_are_the_same() -> None:
    file = RecordsFile()
    first = [row(seq=n, name=f"layer.{n}", slot=n) for n in range(4)]
    floats, counts = np.arange(20.0).reshape(4, 5), np.zeros((4, 4), np.int64)

    def written(step: int, rows: list[Row], values: np.ndarray, identity: dict[str, int]) -> pa.Table:
        content = file.content(step, rows, (values, counts), None, identity, complete=True)
        return pq.read_table(pa.BufferReader(bytes(content)))

    for step, rows, values in (
        (1, first, floats),
        (2, [Row(*r) for r in first], floats + 1),
        (3, [first[0]._replace(name="other"), *first[1:]], floats + 2),
        (4, first[:2], floats + 3),
        (5, [first[1]._replace(slot=0), first[0]._replace(slot=1)], floats + 4),
    ):
        found = written(step, rows, values, IDENTITY)
        expected = build_table(step, rows, values, counts, IDENTITY)
        assert found.to_pylist() == expected.to_pylist()
    assert found.column("min").to_pylist() == [4.0, 9.0] and found.column("step").to_pylist() == [5, 5]
    elsewhere = written(6, first[:2], floats, {**IDENTITY, "rank": 9})
    assert elsewhere.column("rank").to_pylist() == [9, 9]
