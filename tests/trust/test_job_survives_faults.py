"""An exception at each place inside the kit: training ends with the same bits, and the fault is told once."""

import contextlib
import io
import json
import os

import pytest
import torch

from msprobe_megatron.cli import main
from tests.forked import run_forked
from tests.trust.fault_points import FAULT_POINTS, RECOMPUTE, TP2, break_at
from tests.trust.jobs import flags, plain, probe_file, train

pytestmark = pytest.mark.trust
STEPS = 4
_LEFT_ALONE = "no hook, no mode, no patch"


@pytest.fixture(scope="module")
def expected():
    """The numbers of each kind of job without the kit, trained when first asked for."""
    known = {}

    def of(extra, world):
        if extra not in known:
            known[extra] = plain(STEPS, extra, world)
        return known[extra]

    return of


def what_is_left(chunks):
    """What the kit has left on the model and in torch; nothing after a fault and a step."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel.random import CheckpointFunction

    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for chunk in chunks for m in chunk.modules())
    mode = torch.overrides._get_current_function_mode()
    patched = [
        function
        for function in (schedules.forward_step, CheckpointFunction.backward, torch.distributed.all_reduce)
        if getattr(function, "__msprobe_live__", lambda: False)()
    ]
    apply = torch.autograd.Function.__dict__["apply"]
    left = {"hooks": hooks, "mode": mode is not None, "patches": len(patched), "apply": "ApiSite" in repr(apply)}
    return [f"{name}: {value}" for name, value in left.items() if value] or [_LEFT_ALONE]


def train_with_fault(name, argv):
    """The job with one fault point; what it gave, what it said, and what the kit left on the model in the last step."""
    from msprobe_megatron.demo.pretrain_gpt import run
    from msprobe_megatron.demo.train import Callbacks
    from msprobe_megatron.dispatch import DISPATCHER

    break_at(FAULT_POINTS[name])
    said, chunks_seen, left = io.StringIO(), [], []

    def during(iteration):
        if iteration == 2:
            for session in DISPATCHER.sessions():
                session.writer.flush(60)  # a fault of the writer has then happened
        if iteration == STEPS:
            left.extend(what_is_left(chunks_seen))

    with contextlib.redirect_stderr(said):
        callbacks = Callbacks(ready=lambda chunks, optimizer: chunks_seen.extend(chunks), gradients=during)
        result = run(argv, callbacks)
    parameters = [p.detach().clone() for c in result.chunks for p in c.parameters()]
    return {"losses": result.losses, "parameters": parameters, "stderr": said.getvalue(), "left": left}


@pytest.mark.parametrize("name", FAULT_POINTS)
def test_a_fault_changes_no_bit_and_is_told_once(tmp_path, expected, capsys, name):
    point = FAULT_POINTS[name]
    out = tmp_path / "out"
    argv = flags(STEPS, probe_file(tmp_path, point.probe + "\n"), out, point.flags)
    found = run_forked(point.world, train_with_fault, name, argv)
    for mine, reference in zip(found, expected(point.flags, point.world), strict=True):
        assert mine["losses"] == reference["losses"]
        assert all(torch.equal(a, b) for a, b in zip(mine["parameters"], reference["parameters"], strict=True))
    broken = found[point.rank or 0]
    lines = [line for line in broken["stderr"].splitlines() if "msprobe" in line and "disarmed" in line]
    assert len(lines) == 1, broken["stderr"]
    assert "injected" in lines[0]
    assert "Traceback" not in broken["stderr"]
    at_the_end = name in ("close", "ledger")
    if name != "taking the patches of a step away" and not at_the_end:
        assert broken["left"] == [_LEFT_ALONE]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("fault") == 1
    if name != "facts":
        assert main(["diagnose", str(out)]) == 1
        assert "injected" in capsys.readouterr().out


class Unprintable(Exception):
    def __str__(self):
        raise MemoryError


def train_when_nothing_can_be_told(argv):
    """A fault, an event that cannot be written, a log that is closed, an error that cannot be printed."""
    from msprobe_megatron.record.directory import RunDirectory
    from msprobe_megatron.sites.modules import ModuleSite

    def broken(*args, **kwargs):
        raise Unprintable

    def full(*args, **kwargs):
        raise MemoryError

    ModuleSite._see, RunDirectory.append_event = broken, full
    with open(os.devnull) as read_only, contextlib.redirect_stderr(read_only):
        return train(argv)


def test_a_fault_that_cannot_even_be_told(tmp_path, expected):
    argv = flags(STEPS, probe_file(tmp_path), tmp_path / "out")
    (found,) = run_forked(1, train_when_nothing_can_be_told, argv)
    (reference,) = expected("", 1)
    assert found["losses"] == reference["losses"]
    assert all(torch.equal(a, b) for a, b in zip(found["parameters"], reference["parameters"], strict=True))


def train_strictly(name, argv):
    """The same with `strict`: the error that ends it."""
    break_at(FAULT_POINTS[name])
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            train(argv)
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}", "stderr": said.getvalue()}
    return {"error": "", "stderr": said.getvalue()}


@pytest.mark.parametrize("name", ["module hook", "API gradient", "writer: rows", "optimizer", "which step", "attach"])
def test_strict_stops_with_the_reason(tmp_path, name):
    point = FAULT_POINTS[name]
    text = f"strict: true\n{point.probe}\n"
    (found,) = run_forked(1, train_strictly, name, flags(STEPS, probe_file(tmp_path, text), tmp_path / "out"))
    assert found["error"].startswith("ProbeFault: msprobe: ")
    assert "injected" in found["error"] and "strict" in found["error"]
    assert "the job stops" in found["stderr"]


@pytest.mark.parametrize("flags_", [TP2, "--pipeline-model-parallel-size 2"], ids=["tp2", "pp2"])
@pytest.mark.parametrize("name", ["collective", "writer of one rank"])
def test_strict_stops_all_ranks(tmp_path, name, flags_):
    """The rank with the fault ends; the others fail in what they wait for, at once, and say who stopped."""
    text = f"strict: true\n{FAULT_POINTS[name].probe}\n"
    argv = flags(STEPS, probe_file(tmp_path, text), tmp_path / "out", flags_)
    other, broken = run_forked(2, train_strictly, name, argv, timeout=60)
    assert broken["error"].startswith("ProbeFault: msprobe: ") and "injected" in broken["error"]
    assert other["error"], "the other rank must not go on alone"
    assert "rank 1 stopped the job" in other["stderr"] and "injected" in other["stderr"]


def test_jobs_of_the_fault_points_reach_what_they_break():
    assert {point.flags for point in FAULT_POINTS.values()} == {"", RECOMPUTE, TP2}
