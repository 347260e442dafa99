"""Threads of the host that run the model while steps begin and end: no fault, none of our errors, no wrong row."""

import json
import os
import signal
import sys
import threading

import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.job.measure.once import SeenTensors
from msprobe_megatron.job.record.slots import SlotTable
from msprobe_megatron.job.session.steps import State
from tests.jobs.integrations.rows import faults, rows, steps
from tests.unit.job.features.dump.row_writers import without_row_writer

pytestmark = pytest.mark.trust

_MONITOR = (
    "monitor: {every: 1, activations: true, gradients: true, microbatch_gradients: true, parameters: true, data: true}"
)
_PERTURB = "perturb: {mode: improve_precision, handler: check, stage: %s, list: [softmax, layer_norm, linear]}"
SECTIONS = {
    "dump": "dump: {level: mix, digest: true}",
    "tensor": "dump: {level: L0, task: tensor}",
    "monitor": _MONITOR,
    "recorder": "recorder: {keep_steps: 2}",
    "forward": _PERTURB % "forward",
    "backward": _PERTURB % "backward",
    "all": f"dump: {{level: mix}}\n{_MONITOR}\nrecorder: {{keep_steps: 2}}\n{_PERTURB % 'forward'}",
}


class Block(nn.Module):
    """A little of what is watched, so that a step is short."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.softmax(self.linear(self.norm(x)), -1)


class Idle(torch.optim.SGD):
    """Changes nothing: weights that change under a backward of another thread are the host's own error."""

    def step(self, closure=None):
        return None


def armed(folder, section, chosen="all"):
    (folder / "probe.yaml").write_text(f"output: {folder}/out\nsteps: {chosen}\n{section}\n")
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    return model, Idle(model.parameters(), lr=0.0), folder / "probe.yaml"


def in_thread(function, *args):
    """Run it to its end in another thread; what it raises is kept."""
    errors = []

    def run():
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.fixture
def impatient():
    """Threads change after almost every instruction that lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("section", SECTIONS)
def test_threads_run_the_model_while_steps_go_on(tmp_path, impatient, section):
    eval_frame = pytest.importorskip("torch._dynamo.eval_frame")
    before = eval_frame.set_eval_frame
    model, optimizer, probe = armed(tmp_path, SECTIONS[section], "[0-1, 3-11]")
    session = attach(model, optimizer, probe)
    over = threading.Event()

    def forever(run):
        while not over.is_set():
            run(torch.randn(8, 8))

    def evaluated(x):
        with torch.no_grad():
            model(x)

    runs = (
        lambda x: model(x).sum().backward(),
        lambda x: [block(x).sum().backward() for block in model],
        evaluated,
        lambda x: model[1].linear(x),
    )
    threads = [in_thread(forever, run) for run in runs]
    for _ in range(12):
        for _ in range(2):
            model(torch.ones(8, 8)).sum().backward()
        optimizer.step()
    session.close()  # while they go on
    over.set()
    for thread, errors in threads:
        thread.join(60)
        assert not thread.is_alive() and errors == []
    assert session.faults == []
    assert eval_frame.set_eval_frame is before
    assert len(torch.overrides._get_current_function_mode_stack()) == 0
    if "dump" in SECTIONS[section]:
        written = steps(tmp_path / "out")
        assert {0, 1, *range(3, 12)} <= set(written)
        for step in written:  # step 12 is one that a thread had only begun when the session was closed
            assert rows(tmp_path / "out", step) or step == 12


@pytest.mark.parametrize("section", ["dump", "monitor", "forward", "modules"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_hooks_that_are_taken_away_while_torch_walks_over_them(tmp_path, section, where):
    """torch calls them all the same, in another form: the host's thread must not be given our TypeError."""
    asked = SECTIONS.get(section, "perturb: {mode: improve_precision, handler: check, stage: forward, modules: [norm]}")
    model, optimizer, probe = armed(tmp_path, asked, "[0]")
    inside, go_on = threading.Event(), threading.Event()

    def hold(*_):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(30)

    for module in (model[0], model[0].norm):  # before ours, which are set when the step begins
        (module.register_forward_pre_hook if where == "before" else module.register_forward_hook)(hold)
    session = attach(model, optimizer, probe)
    model(torch.ones(8, 8)).sum().backward()
    thread, errors = in_thread(model[0], torch.ones(8, 8))
    assert inside.wait(30)
    optimizer.step()
    go_on.set()
    thread.join(30)
    session.close()
    assert errors == [] and faults(tmp_path / "out")[0] == []


def test_a_step_that_one_thread_begins_while_another_ends_it(tmp_path):
    model, optimizer, probe = armed(tmp_path, "dump: {level: L0}")
    session = attach(model, optimizer, probe)
    begun, go_on = threading.Event(), threading.Event()
    apply = session._step_patches.apply

    def slowly(**kwargs):
        begun.set()
        assert go_on.wait(30)
        apply(**kwargs)

    session._step_patches.apply = slowly
    first, errors = in_thread(model, torch.ones(8, 8))
    assert begun.wait(30)
    second, more = in_thread(optimizer.step)
    second.join(0.2)
    session._step_patches.apply = apply
    go_on.set()
    first.join(30)
    second.join(30)
    for _ in range(2):
        model(torch.ones(8, 8)).sum().backward()
        optimizer.step()
    session.close()
    assert errors == more == [] and faults(tmp_path / "out") == ([], [])
    assert steps(tmp_path / "out") == [0, 1, 2]
    assert len(rows(tmp_path / "out", 1)) == len(rows(tmp_path / "out", 2)) > 0


@pytest.mark.parametrize("section", ["dump", "forward"])
def test_a_step_that_ends_in_another_thread_than_it_began_in(tmp_path, section):
    """torch has a stack of modes for each thread: the next step is seen too, and nothing outlives the thread."""
    eval_frame = pytest.importorskip("torch._dynamo.eval_frame")
    before = eval_frame.set_eval_frame
    model, optimizer, probe = armed(tmp_path, SECTIONS[section], "[0, 1]")
    session = attach(model, optimizer, probe)
    begun, go_on = threading.Event(), threading.Event()

    def begins():
        model(torch.ones(8, 8)).sum().backward()
        begun.set()
        assert go_on.wait(30)
        torch.softmax(model(torch.ones(8, 8)), -1)

    thread, errors = in_thread(begins)
    assert begun.wait(30)
    optimizer.step()
    torch.softmax(model(torch.ones(8, 8)), -1).sum().backward()
    optimizer.step()
    session.close()
    go_on.set()
    thread.join(30)
    assert errors == [] and faults(tmp_path / "out") == ([], [])
    assert eval_frame.set_eval_frame is before
    assert not torch.overrides._get_current_function_mode_stack()
    if section == "dump":
        assert any(row["name"].startswith("outside/torch.softmax") for row in rows(tmp_path / "out", 1))


def test_no_step_begins_after_the_end(tmp_path):
    """A thread that was about to call the model when the session was closed finds nothing of it."""
    model, optimizer, probe = armed(tmp_path, "dump: {level: mix}")
    session = attach(model, optimizer, probe)
    watched = model._call_impl
    session.close()
    watched(torch.ones(8, 8))
    assert session.state is State.CLOSED and not model[0]._forward_hooks


def test_an_evaluation_in_another_thread_is_not_of_the_step_and_hides_nothing_of_it(tmp_path):
    found = {}
    for name in ("alone", "evaluated"):
        folder = tmp_path / name
        folder.mkdir()
        model, optimizer, probe = armed(folder, "dump: {level: mix}", "[0]")
        inside, go_on = threading.Event(), threading.Event()

        def hold(*_, inside=inside, go_on=go_on):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert go_on.wait(30)

        model[1].register_forward_pre_hook(hold)
        session = attach(model, optimizer, probe)

        def evaluate(model=model):
            with torch.no_grad():
                model(torch.full((8, 8), 3.0))

        out = model(torch.ones(8, 8))
        thread, errors = in_thread(evaluate if name == "evaluated" else inside.set)
        assert inside.wait(30)
        model(torch.ones(8, 8)).sum().backward()
        go_on.set()
        thread.join(30)
        out.sum().backward()
        optimizer.step()
        session.close()
        assert errors == [] and faults(folder / "out") == ([], [])
        found[name] = [
            tuple(row[key] for key in ("kind", "name", "io", "path", "microbatch", "phase", "max", "sumsq"))
            for row in rows(folder / "out", 0)
        ]
    assert found["alone"] == found["evaluated"]


@pytest.mark.parametrize("section", ["dump: {level: L0}", "monitor: {every: 1, activations: true}"])
def test_figures_that_come_into_a_slot_of_the_next_step(tmp_path, section):
    """The slot was taken in step 0 and is filled in step 1, whose own figures are lost then, and not mistaken."""
    model, optimizer, probe = armed(tmp_path, section)
    session = attach(model, optimizer, probe)
    watching = next(part for part in session.features.all if part.name in ("dump", "monitor"))._probe
    if hasattr(watching, "_page"):
        without_row_writer(watching)
    taken, go_on = threading.Event(), threading.Event()
    measure = watching._measure

    class Slow:
        def __getattr__(self, name):
            return getattr(measure, name)

        def __call__(self, tensor, *rest):
            if threading.current_thread() is thread:
                taken.set()
                assert go_on.wait(30)
            return measure(tensor, *rest)

    watching._measure = Slow()
    thread = threading.Thread(target=model[0].norm, args=(torch.full((8, 8), 77.0),))

    def among_the_first(*_):
        if not taken.is_set():
            thread.start()
            assert taken.wait(30)

    model[0].register_forward_pre_hook(among_the_first)
    for step in range(3):
        model(torch.ones(8, 8))
        if step == 1:
            go_on.set()
            thread.join(30)
        optimizer.step()
    session.close()
    assert faults(tmp_path / "out") == ([], [])
    ledger = json.loads((tmp_path / "out/ranks/rank_00000.json").read_text())["ledger"]
    assert ledger.get("monitor", ledger)["late"] >= 1
    if section.startswith("dump"):
        seen = {step: rows(tmp_path / "out", step) for step in (1, 2)}
        assert all(row["max"] != 77.0 for rows_of_step in seen.values() for row in rows_of_step)
        assert sum(row["max"] is None for row in seen[1]) > sum(row["max"] is None for row in seen[2]) == 0


def test_a_spoilt_slot_reads_as_one_that_was_not_filled():
    table = SlotTable(torch.device("cpu"), 4)
    for spoil in (False, True, False):
        slots = [table.take() for _ in range(3)]
        for slot in slots:
            table.floats(slot).fill_(slot)
            table.counts(slot).fill_(slot)
        if spoil:
            table.invalidate(slots[1])
            table.invalidate(-1)
        floats, counts = table.seal().wait()
        assert floats[[0, 2]].tolist() == [[0.0] * 5, [2.0] * 5]
        assert (floats[1] != floats[1]).all() == spoil and (counts[1] == -1).all() == spoil


def test_what_was_seen_is_forgotten_by_several_threads_at_once(impatient):
    seen, over = SeenTensors(), threading.Event()
    seen._prune_at = 64

    def put():
        while not over.is_set():
            for x in [torch.ones(2) for _ in range(100)]:
                seen.remember(x, 1)
                seen.lookup(x)

    def forget():
        while not over.is_set():
            seen.forget_all()
            seen._prune_at = 64

    threads = [in_thread(work) for work in (put, put, forget, forget)]
    over.wait(0.5)
    over.set()
    for thread, errors in threads:
        thread.join(30)
        assert errors == []


def test_a_child_forked_while_locks_are_held_does_not_wait(tmp_path):
    """Threads that hold the locks of the kit do not exist in a fork: it trains on, and ends."""
    model, optimizer, probe = armed(tmp_path, SECTIONS["all"])
    session = attach(model, optimizer, probe)
    model(torch.ones(8, 8)).sum().backward()
    monitor = next(part for part in session.features.all if part.name == "monitor")._probe
    dump = next(part for part in session.features.all if part.name == "dump")._probe
    held, over = threading.Event(), threading.Event()

    def hold():
        with session._guard.step_lock, monitor._noting, monitor._seen._changing, dump._page.seen._changing:
            held.set()
            over.wait(60)

    thread, errors = in_thread(hold)
    assert held.wait(30)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            for _ in range(2):
                model(torch.ones(8, 8)).sum().backward()
                optimizer.step()
            session.close()
            del monitor, dump, session
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    over.set()
    thread.join(30)
    optimizer.step()
    session.close()
    assert errors == [] and faults(tmp_path / "out")[0] == []


def test_what_perturb_examines_while_its_figures_are_handed_over(tmp_path):
    """The line was taken from the figures that are on their way: no later row may name it."""
    model, optimizer, probe = armed(tmp_path, SECTIONS["forward"])
    session = attach(model, optimizer, probe)
    part = session.features.all[0]
    check, handed = part._runner._check, []

    def slowly(case, line):
        check(case, line)
        if not handed and part._runner.found:
            handed.append(len(part._runner.found))
            part._submit()

    part._runner._check = slowly
    for _ in range(2):
        model(torch.ones(8, 8)).sum().backward()
        optimizer.step()
    lines = [row.line for row in part._runner.found]
    assert handed and lines and lines == sorted(set(lines))
    session.close()
    assert faults(tmp_path / "out")[0] == []
