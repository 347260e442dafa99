"""The writer thread: bounded, never in the way of training, every batch written or counted as dropped."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from msprobe_megatron.job.record.step_files import StepBatch
from msprobe_megatron.job.record.writer import Batch, Writer
from msprobe_megatron.run_directory.directory import RunDirectory
from tests.unit.job.record.samples import IDENTITY, batch, row, sealed

SOON = 60.0  # seconds; only reached when something is broken


class Gate(RunDirectory):
    """A directory whose tables wait until told, and fail if told."""

    def __init__(self, inner: RunDirectory) -> None:
        super().__init__(inner.path, inner._descriptor)
        self.opened, self.entered = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def write_table(self, relative: str, table: Any) -> int:
        self.entered.set()
        assert self.opened.wait(SOON)
        if self.error is not None:
            raise self.error
        return super().write_table(relative, table)


@pytest.fixture
def faults() -> list[BaseException]:
    return []


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(RunDirectory.create(tmp_path / "run"))
    yield made
    made.opened.set()


def test_a_step_becomes_two_files(tmp_path: Path, faults: list[BaseException]) -> None:
    writer = Writer(RunDirectory.create(tmp_path), IDENTITY, 1 << 20, faults.append)
    assert writer.submit(batch(step=10, rows=5))
    assert writer.submit(batch(step=1234567, rows=2, complete=False))
    assert writer.close()
    folder = tmp_path / "step_000010" / "rank_00003"
    assert sorted(p.name for p in folder.iterdir()) == ["records.parquet", "sites.json"]
    assert json.loads((folder / "sites.json").read_text()) == {"0": "train.py:1"}
    table = pq.read_table(folder / "records.parquet")
    assert table["sum"].to_pylist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert set(table["rank"].to_pylist()) == {3} and set(table["etp"].to_pylist()) == {7}
    assert set(table["step"].to_pylist()) == {10}
    assert table.schema.metadata[b"complete"] == b"true"
    cut = pq.read_table(tmp_path / "step_1234567" / "rank_00003" / "records.parquet")
    assert cut.schema.metadata[b"complete"] == b"false" and cut.schema.metadata[b"version"] == b"1"
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert writer.counts.as_dict() == {
        "steps_written": 2,
        "rows_written": 7,
        "bytes_written": size,
        "steps_dropped": 0,
        "rows_dropped": 0,
        "bytes_dropped": 0,
        "tensors_written": 0,
        "tensors_dropped": 0,
    }
    assert faults == []


def test_a_step_without_rows_is_written_too(tmp_path: Path, faults: list[BaseException]) -> None:
    writer = Writer(RunDirectory.create(tmp_path), IDENTITY, 1 << 20, faults.append)
    writer.submit(StepBatch(1, [], sealed(), {}, True))
    writer.close()
    assert pq.read_table(tmp_path / "step_000001/rank_00003/records.parquet").num_rows == 0
    assert faults == []


def test_flush_waits_for_what_was_submitted(gate: Gate, faults: list[BaseException]) -> None:
    writer = Writer(gate, IDENTITY, 1 << 20, faults.append)
    writer.submit(batch())
    assert writer.flush(timeout=0.05) is False
    gate.opened.set()
    assert writer.flush(timeout=SOON) is True
    assert (gate.path / "step_000010/rank_00003/records.parquet").exists()
    assert writer.counts.steps_written == 1
    assert writer.close()


def test_full_queue_drops_and_counts(gate: Gate, faults: list[BaseException]) -> None:
    one = batch().nbytes
    writer = Writer(gate, IDENTITY, int(2.5 * one), faults.append, policy="drop")
    answers = [writer.submit(batch(step)) for step in range(6)]
    assert answers == [True, True, False, False, False, False]
    assert (writer.counts.steps_dropped, writer.counts.rows_dropped) == (4, 20)
    assert writer.counts.bytes_dropped == 4 * one
    gate.opened.set()
    assert writer.close()
    assert (writer.counts.steps_written, writer.counts.rows_written) == (2, 10)
    assert faults == []


def test_full_queue_blocks_until_there_is_room(gate: Gate, faults: list[BaseException]) -> None:
    one = batch().nbytes
    writer = Writer(gate, IDENTITY, int(2.5 * one), faults.append)
    assert writer.submit(batch(1)) and writer.submit(batch(2))
    done = threading.Event()

    def training() -> None:
        writer.submit(batch(3))
        done.set()

    thread = threading.Thread(target=training)
    thread.start()
    assert gate.entered.wait(SOON)
    assert not done.wait(0.1), "submit must wait while the queue is full"
    assert writer._held_bytes <= 2.5 * one
    gate.opened.set()
    assert done.wait(SOON)
    thread.join()
    assert writer.close()
    assert writer.counts.steps_written == 3 and writer.counts.steps_dropped == 0


def test_waiting_has_an_end(gate: Gate, faults: list[BaseException]) -> None:
    writer = Writer(gate, IDENTITY, 1, faults.append, block_seconds=0.05)
    assert writer.submit(batch(1)) is True, "a batch larger than the queue is let in alone"
    assert writer.submit(batch(2)) is False
    assert writer.counts.steps_dropped == 1
    gate.opened.set()
    assert writer.close()
    assert writer.counts.steps_written == 1


def test_a_fault_is_told_once_and_the_rest_is_dropped(gate: Gate, faults: list[BaseException]) -> None:
    writer = Writer(gate, IDENTITY, 1 << 20, faults.append)
    gate.error = OSError(28, "No space left on device")
    for step in range(3):
        assert writer.submit(batch(step))
    gate.opened.set()
    assert writer.flush(SOON)
    assert writer.submit(batch(3)) is False
    assert writer.close()
    assert faults == [gate.error]
    assert writer.counts.steps_dropped == 4 and writer.counts.rows_dropped == 20
    assert writer.counts.steps_written == 0


def test_a_fault_frees_whoever_waits(gate: Gate, faults: list[BaseException]) -> None:
    writer = Writer(gate, IDENTITY, 1, faults.append)
    gate.error = MemoryError()
    writer.submit(batch(1))
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(writer.submit(batch(2))))
    thread.start()
    gate.opened.set()
    thread.join(SOON)
    assert answers in ([True], [False])  # let in just before the fault, or refused after it
    assert writer.close()
    assert len(faults) == 1
    assert writer.counts.steps_dropped == 2


@pytest.mark.parametrize("kind", ["rows", "slots", "handler"])
def test_nothing_reaches_training(tmp_path: Path, kind: str) -> None:
    told = []

    def on_fault(error: BaseException) -> None:
        told.append(error)
        writer.close()  # a session may well do that
        if kind == "handler":
            raise RuntimeError("the handler is broken too")

    writer = Writer(RunDirectory.create(tmp_path), IDENTITY, 1 << 20, on_fault)
    bad = {
        "rows": StepBatch(1, [row(shape="not a shape")], sealed(), {}, True),
        "slots": StepBatch(1, [row(slot=9)], sealed(), {}, True),
        "handler": StepBatch(1, [row(numel="x")], sealed(), {}, True),
    }[kind]
    assert writer.submit(bad)
    assert writer.flush(SOON)
    assert writer.close()
    assert len(told) == 1
    assert writer.counts.steps_dropped == 1
    assert not list(tmp_path.rglob("records.parquet"))


def test_close_writes_what_waits_and_is_idempotent(gate: Gate, faults: list[BaseException]) -> None:
    writer = Writer(gate, IDENTITY, 1 << 20, faults.append)
    for step in range(4):
        writer.submit(batch(step))
    assert writer.close(timeout=0.05) is False
    gate.opened.set()
    assert writer.close(timeout=SOON) is True
    assert writer.close() is True
    assert writer.counts.steps_written == 4
    assert writer.submit(batch(9)) is False
    assert writer.counts.steps_dropped == 1


def test_forked_child_refuses_without_touching_a_lock(gate: Gate, faults: list[BaseException]) -> None:
    writer = Writer(gate, IDENTITY, 1 << 20, faults.append)
    offered = batch(5)  # made here: torch may have threads that the child has not
    with writer._changed:  # held at the moment of the fork, so held for ever in the child
        pid = os.fork()
        if pid == 0:
            try:
                ok = writer.submit(offered) is False and writer.flush() is True and writer.close() is True
                os._exit(0 if ok and writer.counts.steps_dropped == 0 else 1)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.opened.set()
    assert writer.submit(batch(6)) and writer.close()
    assert writer.counts.steps_written == 1
    assert sorted(p.name for p in gate.path.iterdir()) == ["step_000006"]


def test_sites_changed_after_submit_do_not_unbalance_the_queue(gate: Gate, faults: list[BaseException]) -> None:
    writer = Writer(gate, IDENTITY, 1 << 20, faults.append)
    late = batch()
    writer.submit(late)
    late.sites["another"] = "site"
    gate.opened.set()
    assert writer.flush(SOON)
    assert writer._held_bytes == 0
    assert writer.close()


def test_mistakes_are_named_at_once(tmp_path: Path, faults: list[BaseException]) -> None:
    directory = RunDirectory.create(tmp_path)
    with pytest.raises(ValueError, match="identity: tp, etp missing; needed: rank, tp"):
        Writer(directory, {k: v for k, v in IDENTITY.items() if k not in ("tp", "etp")}, 1, faults.append)
    with pytest.raises(ValueError, match="policy: 'wait' is unknown; accepted: block, drop"):
        Writer(directory, IDENTITY, 1, faults.append, policy="wait")


def test_identity_may_hold_more_than_is_written(tmp_path: Path, faults: list[BaseException]) -> None:
    writer = Writer(RunDirectory.create(tmp_path), {**IDENTITY, "edp": 1}, 1 << 20, faults.append)
    writer.submit(batch())
    writer.close()
    assert "edp" not in pq.read_table(tmp_path / "step_000010/rank_00003/records.parquet").column_names
    assert faults == []


class _Sized(Batch):
    """Writes two files of given sizes and expects nothing of them, as the first batch of its kind does."""

    def __init__(self, number, sizes, large=False):
        self.number, self.sizes = number, sizes
        self.large = large

    def write(self, directory, identity):
        sizes = enumerate(self.sizes)
        return sum(directory.write_file(f"batch_{self.number}/{n}", lambda f, s=s: f.write(b"x" * s)) for n, s in sizes)

    def begin(self, directory, identity):
        return directory.begin_file(f"batch_{self.number}/large", lambda f: f.write(b"x" * sum(self.sizes)))


@pytest.mark.parametrize("slow", [False, True], ids=["keeps up", "falls behind"])
@pytest.mark.parametrize("large", [False, True], ids=["written one by one", "synced together"])
def test_the_disk_limit_is_never_passed(tmp_path, faults, slow, large):
    """Whatever a batch turns out to be, and however many wait while the writer is busy."""
    gate = threading.Event()

    class Gate(Batch):
        def write(self, directory, identity):
            gate.wait(10)
            return 0

    said = []
    writer = Writer(
        RunDirectory.create(tmp_path / "run"), IDENTITY, 1 << 20, faults.append, disk_bytes=1000, on_limit=said.append
    )
    if slow:
        writer.submit(Gate())
    for number, sizes in enumerate([(300, 200), (10, 600), (100, 350), (900, 1), (20, 10), (500, 500)]):
        writer.submit(_Sized(number, sizes, large))
    gate.set()
    writer.close()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    written = sum(path.stat().st_size for path in files if path.parent.name.startswith("batch_"))
    assert 500 <= written <= 1000 and writer.counts.bytes_written == written
    assert not [path for path in files if path.suffix == ".tmp"] and len(said) == 1 and not faults
    if not large:
        # The second file of a batch did not fit: the first is there, is counted, and the batch is dropped.
        assert (tmp_path / "run/batch_1/0").stat().st_size == 10 and not (tmp_path / "run/batch_1/1").exists()
