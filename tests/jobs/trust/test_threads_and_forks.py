"""Data-loader workers, forked children and the end of the process: nobody but the training process records."""

import json
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
from tests.jobs.integrations.rows import faults, rows
from tests.support.forked import prepare

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
import sys, threading
import torch
from torch import nn
from msprobe_megatron import attach
from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.job.record.writer import Writer
torch.set_num_threads(1)
write, close, closing = RunDirectory.write_table, Writer.close, threading.Event()
RunDirectory.write_table = lambda self, *a: (closing.wait(60), write(self, *a))[1]      # all steps wait at the end
Writer.close = lambda self, *a: (closing.set(), close(self, *a))[1]
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


# One process imports torch and forks; each child then goes through the whole end of an interpreter of its own.
_LAUNCHER = """
import json, os, sys
import pyarrow.parquet, torch
import msprobe_megatron.job.session.session
children = {}
for name, (script, config, log) in json.loads(sys.argv[1]).items():
    children[name] = os.fork()
    if not children[name]:
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        sys.argv = [script, config]
        break
else:
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in children.items()}
    os.write(1, json.dumps(codes).encode())
    os._exit(0)
with open(script) as file:
    exec(compile(file.read(), script, "exec"), {"__name__": "__main__"})
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Every way to end, all at once: where its files are, and its exit code."""
    folders, jobs = {}, {}
    for name, (statement, _, _) in _ENDS.items():
        folder = folders[name] = tmp_path_factory.mktemp("end")
        (folder / "script.py").write_text(textwrap.dedent(_SCRIPT).format(end=statement))
        (folder / "log.txt").touch()
        jobs[name] = [str(folder / "script.py"), str(probe(folder, "L0")), str(folder / "log.txt")]
    command = [sys.executable, "-c", _LAUNCHER, json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    codes = json.loads(done.stdout)
    return {name: (folder, codes[name]) for name, folder in folders.items()}


@pytest.mark.parametrize("end", _ENDS)
def test_the_process_ends_as_it_would_and_what_waits_is_written(ends, end):
    _, code, steps = _ENDS[end]
    folder, found = ends[end]
    log = (folder / "log.txt").read_text().replace(str(folder), "")
    assert found == code, log
    spoken = [line for line in log.splitlines() if "msprobe" in line and not line.startswith("msprobe: ")]
    stopped = "msprobe [rank 0]: step 3 stopped (/script.py:18 <module>): ValueError: of the host"
    wanted = [f"{stopped}; the rest of the step is missing"] if end == "raises inside a step" else []
    assert spoken == wanted, log
    assert "probe disabled" not in log and ("Traceback" in log) == (code == 1)
    assert len(list((folder / "out").glob("step_*/rank_00000/records.parquet"))) == steps
    assert b'"closed": true' in (folder / "out/ranks/rank_00000.json").read_bytes()


def test_ranks_can_be_forked_from_a_process_with_a_closed_session(tmp_path):
    """What these tests do themselves: the parent's own sessions must not follow into the ranks."""
    prepare()
    model = net()
    attach(model, None, probe(tmp_path)).close()
    assert in_child(lambda: None) == 0
