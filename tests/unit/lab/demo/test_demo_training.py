"""The demo as a user runs it: alone and under torchrun, with its log, its losses on disk and its refusals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from msprobe_megatron.lab.demo.data import sample
from msprobe_megatron.lab.demo.pretrain_gpt import run
from msprobe_megatron.lab.demo.train import Callbacks
from tests.support.forked import run_forked
from tests.unit.lab.demo.small_job import BASE, train_in

SCRIPT = ["-m", "msprobe_megatron.demo.pretrain_gpt"]


def launch(command: list[str], flags: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    # Nothing of the surrounding job, if there is one, may leak into a job of its own.
    hidden = {"RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MSPROBE_CONFIG"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [sys.executable, *command, *flags],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=environment,
    )


def test_alone_it_trains_and_logs_and_keeps_the_losses_unrounded(tmp_path: Path) -> None:
    done = launch(SCRIPT, [*BASE, "--save-losses", "out/losses.jsonl"], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(" iteration ")]
    rows = [json.loads(line) for line in (tmp_path / "out/losses.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    for line, row in zip(lines, rows, strict=True):
        assert f" iteration {row['iteration']:8d}/       3 |" in line
        assert f"| lm loss: {row['loss']:.6E} |" in line
        assert f"| grad norm: {row['grad_norm']:.3f} |" in line
        assert re.search(r"elapsed time per iteration \(ms\): \d+\.\d \|", line)
    expected = train_in(1, "")
    assert [row["loss"] for row in rows] == expected["losses"]
    assert [row["grad_norm"] for row in rows] == expected["grad_norms"]


def test_bad_layout_under_torchrun_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *SCRIPT]
    done = launch(torchrun, [*BASE, "--pipeline-model-parallel-size", "4"], tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("pretrain_gpt.py: error: world size (2) is not divisible by total model size (4") == 1
    assert "msprobe_megatron/demo" not in done.stderr, "a traceback of the demo"


@pytest.mark.parametrize(("text", "fault"), [("stepz: [1]\n", "stepz"), (None, "probe.yaml")])
def test_bad_probe_file_stops_before_training(tmp_path: Path, text: str | None, fault: str) -> None:
    if text is not None:
        (tmp_path / "probe.yaml").write_text(text)
    done = launch(SCRIPT, [*BASE, "--msprobe-config", "probe.yaml"], tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("probe.yaml: ")
    assert fault in done.stderr
    assert done.stderr.count("\n") == 1


def test_loss_falls() -> None:
    losses = train_in(1, "--train-iters 30 --lr 5e-3")["losses"]
    # The first loss is that of guessing, log(128) = 4.85; 32 of 128 tokens occur, log(32) = 3.47.
    assert losses[0] == pytest.approx(4.85, abs=0.1)
    assert losses[-1] < 3.6


def what_callbacks_see(flags: list[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {"events": []}

    def ready(chunks: list[torch.nn.Module], optimizer: Any) -> None:
        seen["chunks"], seen["optimizer"] = chunks, optimizer
        seen["events"].append("ready")

    def gradients(iteration: int) -> None:
        norm = sum(float(p.main_grad.double().square().sum()) for c in seen["chunks"] for p in c.parameters())
        seen["events"].append(["gradients", iteration, norm**0.5])

    callbacks = Callbacks(
        ready=ready,
        gradients=gradients,
        step=lambda step: seen["events"].append(["step", step.iteration, step.loss, step.grad_norm]),
    )
    result = run(flags, callbacks)
    assert result.chunks is seen["chunks"]
    assert result.optimizer is seen["optimizer"]
    return {"events": seen["events"], "losses": result.losses, "grad_norms": result.grad_norms}


def test_callbacks_see_gradients_before_the_step_and_results_after() -> None:
    (seen,) = run_forked(1, what_callbacks_see, BASE)
    events = seen["events"]
    assert events[0] == "ready"
    assert [event[:2] for event in events[1:]] == [[k, i] for i in (1, 2, 3) for k in ("gradients", "step")]
    # Before the optimizer clips them, the gradients have the norm that it reports.
    assert [event[2] for event in events[1::2]] == pytest.approx(seen["grad_norms"], rel=1e-6)
    assert [event[2] for event in events[2::2]] == seen["losses"]


def gradients_by_two_ways(flags: list[str]) -> list[list[torch.Tensor]]:
    """What training accumulates in the first iteration, and plain autograd of the mean loss of the batch."""
    parameters: list[Any] = []
    plain: list[torch.Tensor] = []
    trained: list[torch.Tensor] = []

    def ready(chunks: list[Any], _optimizer: Any) -> None:
        rows = torch.stack([sample(1234, index, 17, 128) for index in range(8)])
        mask = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
        positions = torch.arange(16).expand(8, 16)
        losses = chunks[0].module(rows[:, :-1], positions, mask, labels=rows[:, 1:].contiguous())
        parameters.extend(chunks[0].parameters())
        plain.extend(torch.autograd.grad(losses.mean(), parameters))

    def gradients(iteration: int) -> None:
        trained.extend(p.main_grad.clone() for p in parameters if iteration == 1)

    run(flags, Callbacks(ready=ready, gradients=gradients))
    return [trained, plain]


def test_gradients_are_those_of_the_mean_loss() -> None:
    ((trained, plain),) = run_forked(1, gradients_by_two_ways, BASE)
    assert len(trained) == len(plain) > 40
    for seen, expected in zip(trained, plain, strict=True):
        scale = float(expected.abs().max())
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5 * scale + 1e-9)


def final_weights(flags: list[str]) -> list[torch.Tensor]:
    result = run(flags)
    return [parameter.detach().float() for chunk in result.chunks for parameter in chunk.parameters()]


def test_overlapped_gathers_are_finished_at_the_end() -> None:
    """They end in the next forward; without one, each rank would keep old weights but for its own share."""
    distributed = [*BASE, "--use-distributed-optimizer"]
    overlap = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "2000"]
    plain, late = (
        run_forked(2, final_weights, distributed),
        run_forked(2, final_weights, distributed + overlap),
    )
    for first, second, expected in zip(*late, plain[0], strict=True):
        assert torch.equal(first, second)
        # One step of Adam moves a weight by about the learning rate, 1e-2.
        torch.testing.assert_close(first, expected, rtol=0, atol=1e-4)


def train_twice(flags: list[str]) -> list[list[float]]:
    return [run(flags).losses, run(flags).losses]


def test_a_process_can_train_twice() -> None:
    ((first, second),) = run_forked(1, train_twice, BASE)
    assert first == second


def test_overflow_is_skipped_and_said(tmp_path: Path) -> None:
    flags = ["--fp16", "--initial-loss-scale", str(2.0**40), "--hysteresis", "1", "--train-iters", "2"]
    done = launch(SCRIPT, [*BASE, *flags], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "number of skipped iterations:   1" in done.stdout
