"""`limits.disk` holds for every thread and every kind of file, also when the writer falls behind."""

import threading
from pathlib import Path

import pytest
import torch

from msprobe_megatron import attach
from msprobe_megatron.config import Overrides, from_document
from msprobe_megatron.job.record.writer import Batch
from msprobe_megatron.run_directory.directory import RunDirectory, put, read_events
from msprobe_megatron.run_directory.safe_files import OverAllowance
from tests.unit.job.features.dump.test_tasks import Net

FACTS = ("run.json", "ranks", "events.jsonl")


def recorded_bytes(out: Path) -> int:
    """What is on the disk beside the facts of the run, each file once however many names it has."""
    files = [p for p in out.rglob("*") if p.is_file() and p.relative_to(out).parts[0] not in FACTS]
    return sum({p.stat().st_ino: p.stat().st_size for p in files}.values())


class Gate(Batch):
    """Keeps the writer busy until training is over."""

    def __init__(self):
        self.opened = threading.Event()

    def write(self, directory, identity):
        assert self.opened.wait(60)
        return 0


def run(out, document, *, limit, slow, steps=12, nan_at=None):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    probe = {**document, **({} if limit is None else {"limits": {"disk": limit}})}
    session = attach(net, optimizer, from_document(probe, "test", Overrides(output=str(out))), step=0)
    gate = Gate()
    if slow:
        session.writer.submit(gate)
    for step in range(steps):
        if step == nan_at:
            with torch.no_grad():
                net.second.weight[0, 0] = float("nan")
        optimizer.zero_grad()
        net(torch.randn(5, 8)).sum().backward()
        optimizer.step()
    gate.opened.set()
    session.close()
    assert session.faults == []
    return session


DOCUMENTS = {
    "tensors": {"dump": {"task": "tensor"}},
    "recorder": {"recorder": {"keep_steps": 4}},
    "curves": {"monitor": {"format": ["tensorboard"]}},
    "recorder beside a dump": {"dump": {}, "steps": [0, 1], "recorder": {"keep_steps": 8}},
}


@pytest.mark.parametrize("slow", [False, True], ids=["keeps up", "falls behind"])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_kind_of_file_passes_the_limit(name, slow, tmp_path):
    nan_at = 9 if "recorder" in name else None
    run(tmp_path / "free", DOCUMENTS[name], limit=None, slow=slow, nan_at=nan_at)
    needed = recorded_bytes(tmp_path / "free")
    limit = needed // 8 if name == "curves" else needed // 2  # less than the curves alone
    assert limit > 0
    run(tmp_path / "held", DOCUMENTS[name], limit=limit, slow=slow, nan_at=nan_at)
    assert recorded_bytes(tmp_path / "held") <= limit
    assert any("limits.disk" in event["text"] for event in read_events(tmp_path / "held"))
    # Clean twin: with room for everything, and for a file beside the one it replaces, nothing is dropped.
    run(tmp_path / "room", DOCUMENTS[name], limit=4 * needed, slow=slow, nan_at=nan_at)
    assert not any("limits.disk" in event["text"] for event in read_events(tmp_path / "room"))


@pytest.mark.parametrize("slow", [False, True], ids=["keeps up", "falls behind"])
def test_a_first_step_without_room_is_dropped_and_announces_no_size(slow, tmp_path, capfd):
    session = run(tmp_path / "run", {"dump": {}}, limit=1, slow=slow)
    assert session.writer.counts.steps_written == 0 and session.writer.counts.steps_dropped == 12
    assert recorded_bytes(tmp_path / "run") == 0
    assert "per recorded step" not in capfd.readouterr().out
    run(tmp_path / "room", {"dump": {}}, limit="1MiB", slow=slow)
    assert "per recorded step" in capfd.readouterr().out


@pytest.mark.parametrize("limit", [None, 12_000], ids=["no limit", "limit"])
def test_an_exception_makes_the_recorder_write_no_more_than_the_limit(limit, tmp_path):
    """There the training thread writes, not the writer."""
    net, out = Net(), tmp_path / "run"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    probe = {"recorder": {"keep_steps": 4}, **({} if limit is None else {"limits": {"disk": limit}})}
    session = attach(net, optimizer, from_document(probe, "test", Overrides(output=str(out))), step=0)
    with pytest.raises(ZeroDivisionError), session:
        for _ in range(6):
            net(torch.randn(5, 8)).sum().backward()
            optimizer.step()
        raise ZeroDivisionError
    [event] = [event for event in read_events(out) if event["event"] == "recorder"]
    if limit is None:
        assert event["steps"] == [2, 3, 4, 5] and recorded_bytes(out) > 12_000
    else:
        assert 0 < recorded_bytes(out) <= limit and event["steps"] == [2]
        assert "limits.disk left no room for steps [3, 4, 5]" in event["text"]


@pytest.mark.parametrize("slow", [False, True], ids=["keeps up", "falls behind"])
def test_alerts_outlive_a_limit_that_is_used_up(slow, tmp_path, monkeypatch):
    """Files of two steps: the limit leaves room for one of them, and the NaN comes long after."""
    monkeypatch.setattr("msprobe_megatron.job.record.monitor_files.MOST_STEPS", 2)
    document = {"monitor": {"alerts": ["nonfinite"]}}
    run(tmp_path / "one", document, limit=None, slow=slow, steps=2)
    limit = recorded_bytes(tmp_path / "one") * 3 // 2
    run(tmp_path / "run", document, limit=limit, slow=slow, nan_at=9)
    assert 0 < recorded_bytes(tmp_path / "run") <= limit
    alerts = [event for event in read_events(tmp_path / "run") if event["event"] == "alert"]
    assert alerts and min(event["step"] for event in alerts) == 9
    run(tmp_path / "clean", document, limit=limit, slow=slow)
    assert not [event for event in read_events(tmp_path / "clean") if event["event"] == "alert"]


def test_threads_share_one_allowance_and_a_replaced_file_gives_its_bytes_back(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    directory.limit(1000)
    refused = []

    def write(number):
        for piece in range(10):
            try:
                directory.write_file(f"{number}/{piece}", lambda file: put(file, b"x" * 70))
            except OverAllowance:
                refused.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorded_bytes(tmp_path / "run") == 980 and len(refused) == 40 - 14
    assert directory.allowance is not None and directory.allowance.left == 20
    directory.limit(1000)
    for size in (100, 300, 500):  # each beside the one before it
        directory.write_file("grows", lambda file, size=size: put(file, b"x" * size))
    assert directory.allowance.left == 500
    with pytest.raises(OverAllowance):
        directory.write_file("grows", lambda file: put(file, b"x" * 501))
    assert (tmp_path / "run/grows").stat().st_size == 500 and directory.allowance.left == 500
