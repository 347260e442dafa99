"""An exception at each place inside the kit: training ends with the same bits, and the fault is told once."""

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
import torch

from msprobe_megatron.cli import main
from msprobe_megatron.config.sections.alerts import RULES as SCHEMA_RULES
from tests.jobs.trust.fault_points import FAULT_POINTS, RECOMPUTE, RULES, TP2, FaultPoint, break_at
from tests.jobs.trust.jobs import flags, plain, probe_file, same, train, trained
from tests.support.forked import run_forked

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
    from msprobe_megatron.job.session.patch_scopes import ROUTER
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    break_at(FAULT_POINTS[name])
    said, chunks_seen, left = io.StringIO(), [], []

    def during(iteration):
        if iteration == 1 and FAULT_POINTS[name].order:
            (Path(argv[argv.index("--msprobe-output") + 1]) / "control.json").write_text(FAULT_POINTS[name].order)
        if iteration == 2:
            for session in ROUTER.sessions():
                session.writer.flush(60)  # a fault of the writer has then happened
        if iteration == STEPS:
            left.extend(what_is_left(chunks_seen))

    with contextlib.redirect_stderr(said):
        callbacks = Callbacks(ready=lambda chunks, optimizer: chunks_seen.extend(chunks), gradients=during)
        result = run(argv, callbacks)
    return {**trained(result), "stderr": said.getvalue(), "left": left}


@pytest.mark.parametrize("name", FAULT_POINTS)
def test_a_fault_changes_no_bit_and_is_told_once(tmp_path, expected, capsys, name):
    point = FAULT_POINTS[name]
    out = tmp_path / "out"
    argv = flags(STEPS, probe_file(tmp_path, point.probe + "\n"), out, point.flags)
    found = run_forked(point.world, train_with_fault, name, argv)
    for mine, reference in zip(found, expected(point.flags, point.world), strict=True):
        same(mine, reference)
    broken = found[point.rank or 0]
    lines = [line for line in broken["stderr"].splitlines() if "injected" in line or "probe disabled" in line]
    assert len(lines) == 1, broken["stderr"]
    assert "msprobe" in lines[0] and "injected" in lines[0]
    assert (point.off or "probe disabled by an internal error in") in lines[0]
    assert "Traceback" not in broken["stderr"]
    at_the_end = name in ("close", "ledger", "TensorBoard: last picture", "monitor: file", "perturb: rows")
    if name != "taking the patches of a step away" and not at_the_end and not point.off:
        assert broken["left"] == [_LEFT_ALONE]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert ["injected" in event.get("text", "") for event in events].count(True) == 1
    assert [event["event"] for event in events].count("fault") == (0 if point.off else 1)
    if name != "facts":
        assert main(["diagnose", str(out)]) == 1
        assert "injected" in capsys.readouterr().out


def train_with_broken_rules(argv):
    for rule in RULES.values():
        break_at(FaultPoint(f"job.features.alerts.rules:{rule}.judge", after=1))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        return {**train(argv), "stderr": said.getvalue()}


def test_a_fault_in_every_alert_rule(tmp_path, expected, capsys):
    """Each rule is off after its own fault, with a line and an event; the rest of the kit goes on."""
    asked = {"limit": "{rule: limit, threshold: 1.0e9}", "custom": '{rule: custom, expression: "absmax > 1e9"}'}
    text = f"checks: {{every: 1}}\nmonitor: {{alerts: [{', '.join(asked.get(rule, rule) for rule in RULES)}]}}\n"
    (found,) = run_forked(1, train_with_broken_rules, flags(STEPS, probe_file(tmp_path, text), tmp_path / "out"))
    (reference,) = expected("", 1)
    same(found, reference)
    events = [json.loads(line) for line in (tmp_path / "out/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["alert_fault"] * len(RULES)
    for rule in RULES:
        line = f"alert {rule} is off after an internal error: KeyError: 'injected'"
        assert found["stderr"].count(line) == 1, found["stderr"]
        assert sum(line in event["text"] for event in events) == 1
    assert set(RULES) == set(SCHEMA_RULES), "a new rule gets a line in fault_points.RULES"
    ledger = json.loads((tmp_path / "out/ranks/rank_00000.json").read_text())["ledger"]
    assert ledger["monitor"]["steps"] == STEPS and ledger["faults"] == []
    assert main(["diagnose", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().out.count("injected") >= 1


def arm_with_a_broken_parser(config, strict):
    from msprobe_megatron.config.flags import Flags
    from msprobe_megatron.job.session import arming

    break_at(FaultPoint("config:read_probe_file"))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            armed = arming.arm(Flags(config=config, output=None, strict=strict))
        except KeyError as error:
            return {"config": "raised", "stderr": str(error)}
    return {"config": str(armed.config), "stderr": said.getvalue()}


def test_a_fault_in_the_parser_of_the_probe_file(tmp_path):
    """`-m msprobe_megatron.run` goes on to train, with one line; a file that is wrong is refused all the same."""
    config = str(probe_file(tmp_path))
    (found,) = run_forked(1, arm_with_a_broken_parser, config, False)
    assert found["config"] == "None"
    told = f"{config} could not be read: KeyError: 'injected'; training continues without the probe"
    assert found["stderr"] == f"msprobe: {told}\n"
    (found,) = run_forked(1, arm_with_a_broken_parser, config, True)
    assert found["config"] == "raised" and "injected" in found["stderr"]


class Unprintable(Exception):
    def __str__(self):
        raise MemoryError


def train_when_nothing_can_be_told(argv):
    """A fault, an event that cannot be written, a log that is closed, an error that cannot be printed."""
    from msprobe_megatron.job.sites.module.modules import ModuleSite
    from msprobe_megatron.run_directory.directory import RunDirectory

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
    same(found, reference)


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
