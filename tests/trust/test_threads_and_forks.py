"""Data-loader workers, forked children and the end of the process: nobody but the training process records."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from tests.forked import prepare
from tests.integrations.rows import faults, rows

pytestmark = pytest.mark.trust


def probe(folder, level="mix"):
    path = Path(folder) / "probe.yaml"
    path.write_text(f"output: {folder}/out\ndump: {{level: {level}}}\n")
    return path


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


class Data(torch.utils.data.Dataset):
    """Each item computes in the worker, with the very model that is being watched, and says what it sees of the kit."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 8

    def __getitem__(self, index):
        torch.relu(torch.ones(2) * index)
        self.model(torch.ones(1, 4)).sum().backward()
        mode = torch.overrides._get_current_function_mode() is not None
        hooks = sum(len(m._forward_hooks) for m in self.model.modules())
        return torch.full((4,), float(index)), torch.tensor([float(mode), float(hooks), float(os.getpid())])


def test_data_loader_workers_record_nothing(tmp_path):
    """Workers start inside a recorded step, with every hook and mode of the kit in place at the fork."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with attach(model, optimizer, probe(tmp_path)) as session:
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            for item, facts in torch.utils.data.DataLoader(Data(model), batch_size=4, num_workers=2):
                model(item).sum().backward()
                seen.extend(facts.tolist())
            optimizer.step()
    assert {tuple(facts[:2]) for facts in seen} == {(0.0, 0.0)}
    assert os.getpid() not in {int(facts[2]) for facts in seen}
    assert session.steps_recorded == [0, 1]
    assert faults(tmp_path / "out") == ([], [])
    for step in (0, 1):
        found = rows(tmp_path / "out", step)
        assert {r["microbatch"] for r in found} == {0, 1, 2, None}
        assert sum(r["name"] == "model" and r["io"] == "output" and r["kind"] == "activation" for r in found) == 3


def in_child(work):
    """Run `work` in a fork of this process; its exit code, or None after ten seconds."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def files(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_forked_child_that_trains_and_closes_leaves_no_trace(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, optimizer, probe(tmp_path))
    loss = model(torch.ones(1, 4)).sum()  # in the middle of a step
    before = files(tmp_path / "out")

    def work():
        loss.backward()
        optimizer.step()
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        session.step()
        session.close()

    assert in_child(work) == 0
    assert files(tmp_path / "out") == before
    loss.backward()
    optimizer.step()
    session.close()
    assert session.steps_recorded == [0]


def test_a_child_forked_while_the_writer_holds_its_lock_does_not_wait(tmp_path):
    model = net()
    session = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), probe(tmp_path, "L0"))
    held, done = threading.Event(), threading.Event()

    def hold():
        with session.writer._changed:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)

    def work():
        session.writer.flush()
        session.writer.close()
        session.close()

    try:
        assert in_child(work) == 0
    finally:
        done.set()
        thread.join()
        session.close()


_SCRIPT = """
import sys, threading, time
import torch
from torch import nn
from msprobe_megatron import attach
from msprobe_megatron.record.directory import RunDirectory
torch.set_num_threads(1)
write = RunDirectory.write_table
RunDirectory.write_table = lambda self, *a: (time.sleep(0.3), write(self, *a))[1]      # steps still wait at the end
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
attach(model, optimizer, sys.argv[1])
for step in range(4):
    loss = model(torch.ones(3, 4)).sum()
    if step == 3:
        {end}
    loss.backward()
    optimizer.step()
"""
_ENDS = {
    "falls off the end": ("pass", 0, 4),
    "exits inside a step": ("sys.exit(3)", 3, 4),
    "raises inside a step": ("raise ValueError('of the host')", 1, 4),
    "with a thread that goes on": (
        "threading.Thread(target=lambda: [model(torch.ones(1, 4)) for _ in range(200)], daemon=True).start()",
        0,
        4,
    ),
}


@pytest.mark.parametrize("end", _ENDS)
def test_the_process_ends_as_it_would_and_what_waits_is_written(tmp_path, end):
    statement, code, steps = _ENDS[end]
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT).format(end=statement))
    done = subprocess.run(
        [sys.executable, str(script), str(probe(tmp_path, "L0"))],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "msprobe" not in done.stderr.replace(str(tmp_path), ""), done.stderr
    assert len(list((tmp_path / "out").glob("step_*/rank_00000/records.parquet"))) == steps
    assert b'"closed": true' in (tmp_path / "out/ranks/rank_00000.json").read_bytes()


def test_ranks_can_be_forked_from_a_process_with_a_closed_session(tmp_path):
    """What these tests do themselves: the parent's own sessions must not follow into the ranks."""
    prepare()
    model = net()
    attach(model, None, probe(tmp_path)).close()
    assert in_child(lambda: None) == 0
