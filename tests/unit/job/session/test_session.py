"""The life of a session on real jobs: idle steps, selection, faults, refusals, the way back."""

import json
import stat
from pathlib import Path

import pytest
import torch

from msprobe_megatron.analysis.diagnose.summary import summarise
from msprobe_megatron.analysis.load.run import open_run
from tests.support.forked import RankFailed, run_forked

_JOB = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --global-batch-size 2"
    " --train-iters 4 --lr 1e-2 --vocab-size 32 --attention-dropout 0 --hidden-dropout 0"
)


def job(config=None, out=None, extra=""):
    argv = f"{_JOB} {extra}".split()
    return argv if config is None else [*argv, "--msprobe-config", str(config), "--msprobe-output", str(out)]


def probe_file(tmp_path, text):
    path = tmp_path / "probe.yaml"
    path.write_text(text)
    return path


def train(argv):
    from msprobe_megatron.lab.demo.pretrain_gpt import run

    result = run(argv)
    return {"losses": result.losses, "parameters": [p.detach().clone() for c in result.chunks for p in c.parameters()]}


def refused(argv):
    """Exit code and what was printed on stderr of a job that does not start."""
    import contextlib
    import io

    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            train(argv)
    except SystemExit as end:
        return {"code": end.code, "stderr": text.getvalue()}
    return {"code": None, "stderr": text.getvalue()}


def names_of(run, step=0):
    return {name for (name,) in run.rows(step=step).project("name").distinct().fetchall()}


# Idle steps and the way back.


def look_around(argv):
    """What is patched and hooked in the middle of each step, and after the end."""
    import megatron.core.pipeline_parallel.schedules as schedules
    from megatron.core.tensor_parallel.random import CheckpointFunction

    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    before = {
        "forward_step": schedules.forward_step,
        "schedule": schedules.forward_backward_no_pipelining,
        "checkpoint": vars(CheckpointFunction)["backward"],
        "all_reduce": torch.distributed.all_reduce,
    }
    chunks_seen, seen = [], []

    def during(iteration):
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for c in chunks_seen for m in c.modules())
        seen.append((hooks > 0, schedules.forward_step is not before["forward_step"]))

    class Optimizer:
        pass

    holder = Optimizer()

    def ready(chunks, optimizer):
        chunks_seen.extend(chunks)
        holder.optimizer = optimizer
        holder.own_step = "step" in vars(optimizer)

    run(argv, Callbacks(ready=ready, gradients=during))
    after = {
        "forward_step": schedules.forward_step is before["forward_step"],
        "schedule": schedules.forward_backward_no_pipelining is before["schedule"],
        "checkpoint": vars(CheckpointFunction)["backward"] is before["checkpoint"],
        "all_reduce": torch.distributed.all_reduce is before["all_reduce"],
        "optimizer": ("step" in vars(holder.optimizer)) == holder.own_step,
        "hooks": sum(len(m._forward_hooks) for c in chunks_seen for m in c.modules()) == 0,
    }
    return {"during": seen, "after": after}


def test_hooks_and_patches_exist_only_in_recorded_steps_and_all_is_put_back(tmp_path):
    config = probe_file(tmp_path, "steps: [1, 3]\ndump: {level: L0}\n")
    (found,) = run_forked(1, look_around, job(config, tmp_path / "out"))
    assert found["during"] == [(False, False), (True, True), (False, False), (True, True)]
    assert all(found["after"].values()), found["after"]
    assert open_run(tmp_path / "out").steps == [1, 3]


# Selection.


def test_ranks_by_coordinate_only_those_write(tmp_path):
    config = probe_file(tmp_path, "ranks: {tp: 1}\nsteps: [0]\ndump: {level: L0}\n")
    run_forked(2, train, job(config, tmp_path / "out", "--tensor-model-parallel-size 2"))
    run = open_run(tmp_path / "out")
    assert [(step, rank) for step, rank, _ in run.files] == [(0, 1)]
    assert run.facts["world"] == 2


def test_list_layers_microbatches_and_data_mode_select(tmp_path):
    text = """
steps: [0]
dump:
  level: L0
  list: [linear_fc1, "/input_layernorm$/"]
  layers: [1]
  microbatches: [1]
  data_mode: [forward, output]
"""
    run_forked(1, train, job(probe_file(tmp_path, text), tmp_path / "out"))
    run = open_run(tmp_path / "out")
    rows = run.rows().filter("kind in ('activation', 'gradient')")
    assert set(rows.project("name, io, phase, microbatch").distinct().fetchall()) == {
        ("decoder.layers.1.mlp.linear_fc1", "output", "forward", 1),
        ("decoder.layers.1.input_layernorm", "output", "forward", 1),
    }
    weights = {name for (name,) in run.rows().filter("kind = 'parameter'").project("name").distinct().fetchall()}
    assert weights == {"decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1.bias"}


def test_a_pattern_that_only_another_stage_has_is_fine_and_one_that_none_has_is_told(tmp_path):
    config = probe_file(tmp_path, "steps: [0]\ndump: {level: L0, list: [output_layer, no_such_module]}\n")
    run_forked(2, train, job(config, tmp_path / "out", "--pipeline-model-parallel-size 2"))
    warnings = summarise(open_run(tmp_path / "out")).warnings
    assert any("no_such_module" in text and "any rank" in text for text in warnings)
    assert not any("'output_layer'" in text for text in warnings)


def test_a_step_that_is_never_reached_is_told(tmp_path):
    config = probe_file(tmp_path, "steps: [1, 40]\ndump: {level: L0}\n")
    run_forked(1, train, job(config, tmp_path / "out"))
    warnings = summarise(open_run(tmp_path / "out")).warnings
    assert any("step 40" in text and "last step was 3" in text for text in warnings)


def test_what_the_memory_limit_leaves_out_is_told(tmp_path):
    many = "--global-batch-size 64"
    (plain,) = run_forked(1, train, job(extra=many))
    config = probe_file(tmp_path, "steps: [1]\nlimits: {host_memory: 1MiB}\ndump: {level: L0}\n")
    (found,) = run_forked(1, train, job(config, tmp_path / "out", many))
    assert found["losses"] == plain["losses"]
    run = open_run(tmp_path / "out")
    assert run.ranks[0]["ledger"]["no_room"] > 0
    assert any("limits.host_memory" in text for text in summarise(run).warnings)


# Refusals: before training, one line, exit code 2.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ranks: [9]\ndump: {level: L0}\n", ["ranks", "9", "0..0"]),
        ("ranks: {tp: 3}\ndump: {level: L0}\n", ["ranks.tp", "3", "0..0"]),
        ("dump: {level: L0, list: [no_such_module]}\n", ["dump.list", "no_such_module", "accepted"]),
    ],
)
def test_what_the_world_does_not_have_is_refused_with_one_line(tmp_path, text, words):
    (found,) = run_forked(1, refused, job(probe_file(tmp_path, text), tmp_path / "out"))
    assert found["code"] == 2
    lines = [line for line in found["stderr"].splitlines() if "probe.yaml" in line]
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines[0]


def test_only_one_rank_prints_the_refusal(tmp_path):
    config = probe_file(tmp_path, "ranks: [9]\ndump: {level: L0}\n")
    found = run_forked(2, refused, job(config, tmp_path / "out", "--tensor-model-parallel-size 2"))
    assert [each["code"] for each in found] == [2, 2]
    assert ["probe.yaml" in each["stderr"] for each in found] == [True, False]


def test_a_directory_that_holds_a_run_is_refused_and_left_as_it_was(tmp_path):
    config = probe_file(tmp_path, "steps: [0]\ndump: {level: L0}\n")
    run_forked(1, train, job(config, tmp_path / "out"))
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    (found,) = run_forked(1, refused, job(config, tmp_path / "out"))
    assert found["code"] == 2
    assert "already holds a run" in found["stderr"]
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


# Faults of the kit.


def train_with_fault(argv, where):
    """The same training, with an exception thrown inside the kit at its fifth chance."""
    import itertools

    from msprobe_megatron.job.features.dump.probe import DumpProbe
    from msprobe_megatron.job.sites.training.optimizer import OptimizerSite
    from msprobe_megatron.run_directory.directory import RunDirectory

    owner, name = {
        "site": (DumpProbe, "see"),
        "optimizer": (OptimizerSite, "collect"),
        "finish": (DumpProbe, "finish"),
        "writer": (RunDirectory, "write_table"),
    }[where]
    original, count = getattr(owner, name), itertools.count()
    after = {"site": 40, "optimizer": 1, "finish": 0, "writer": 0}[where]

    def broken(*args, **kwargs):
        if next(count) >= after:
            raise RuntimeError("injected")
        return original(*args, **kwargs)

    setattr(owner, name, broken)
    return train(argv)


@pytest.mark.parametrize("where", ["site", "optimizer", "finish", "writer"])
def test_a_fault_of_the_kit_changes_no_bit_and_is_told(tmp_path, where):
    (plain,) = run_forked(1, train, job())
    config = probe_file(tmp_path, "dump: {level: L0}\n")
    (found,) = run_forked(1, train_with_fault, job(config, tmp_path / "out"), where)
    assert found["losses"] == plain["losses"]
    assert all(torch.equal(a, b) for a, b in zip(found["parameters"], plain["parameters"], strict=True))
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events].count("fault") == 1
    assert "injected" in next(e["text"] for e in events if e["event"] == "fault")
    assert any("injected" in text for text in summarise(open_run(tmp_path / "out")).warnings)


def test_strict_turns_a_fault_into_a_stop(tmp_path):
    config = probe_file(tmp_path, "strict: true\ndump: {level: L0}\n")
    with pytest.raises(RankFailed, match="ProbeFault.*injected"):
        run_forked(1, train_with_fault, job(config, tmp_path / "out"), "site")


def train_until_it_breaks(argv):
    """A training whose forward raises in step 2, microbatch 1."""
    from megatron.core.transformer.mlp import MLP

    original, count = MLP.forward, iter(range(10**6))

    def forward(self, *args, **kwargs):
        if next(count) == 11:
            raise ValueError("the host's own fault")
        return original(self, *args, **kwargs)

    MLP.forward = forward
    try:
        train(argv)
    except ValueError as fault:
        return {"fault": str(fault)}
    return {"fault": ""}


def test_an_exception_of_the_host_passes_and_what_was_seen_is_kept(tmp_path):
    config = probe_file(tmp_path, "dump: {level: L0}\n")
    (found,) = run_forked(1, train_until_it_breaks, job(config, tmp_path / "out"))
    assert found["fault"] == "the host's own fault"
    run = open_run(tmp_path / "out")
    assert run.steps == [0, 1, 2]
    assert len(run.rows(step=2).filter("microbatch = 0")) > 0


def train_while_overwritten(argv):
    """Other code replaces the schedule after the kit has attached, as MindSpeed's repatch does."""
    import megatron.core.pipeline_parallel.schedules as schedules

    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    original = schedules.forward_backward_no_pipelining
    done = []

    def after(step):
        if not done:
            done.append(1)
            schedules.forward_backward_no_pipelining = lambda **kwargs: original(**kwargs)

    run(argv, Callbacks(step=after))
    return {}


def test_a_patch_that_others_overwrite_is_bound_again_and_told(tmp_path):
    config = probe_file(tmp_path, "dump: {level: L0}\n")
    run_forked(1, train_while_overwritten, job(config, tmp_path / "out"))
    run = open_run(tmp_path / "out")
    # Step 1 ran past the kit; its optimizer.step shows that no schedule was seen.
    assert run.steps == [0, 2, 3]
    assert any("overwritten" in text for text in summarise(run).warnings)


# Files.


def test_modes_are_private_whatever_the_umask(tmp_path):
    config = probe_file(tmp_path, "steps: [0]\ndump: {level: L0}\n")
    run_forked(1, train, job(config, tmp_path / "out"))
    out = Path(tmp_path / "out")
    for path in [out, *out.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_names_of_all_kinds_and_stacks_are_there(tmp_path):
    config = probe_file(tmp_path, "steps: [0]\ndump: {level: L0}\n")
    run_forked(1, train, job(config, tmp_path / "out"))
    run = open_run(tmp_path / "out")
    assert {"model", "decoder.layers.0.mlp.linear_fc1", "lm loss", "loss_scale"} <= names_of(run)
    sites = json.loads((tmp_path / "out" / "step_000000" / "rank_00000" / "sites.json").read_text())
    stack = next(entry["stack"] for entry in sites["modules"] if entry["name"].endswith("0.mlp.linear_fc1"))
    assert "mlp.py" in stack[0]
    own = [line for line in stack if "/patching/" in line or "/patches/" in line or "/session.py" in line]
    assert own == [], "a stack shows the training code, not the kit"
    assert any("train.py" in line for line in stack)
    ids = {entry["site"]: entry["name"] for entry in sites["modules"]}
    for site, name in run.rows().filter("kind = 'activation'").project("site, name").distinct().fetchall():
        assert ids[site] == name
