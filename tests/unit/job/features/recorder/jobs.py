"""Jobs with a flight recorder, and a NaN, an exception or a signal at a chosen step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.jobs.compare.faults import around, named
from tests.jobs.distributed.layouts import LAYOUTS, flags_of
from tests.support.forked import run_forked

RECORDER = "recorder: {keep_steps: 4}\n"


def train(argv: list[str], fault: str, at: int, pause: float = 0.0) -> list[float]:
    """Train in this rank; at step `at` (from 0) the fault happens; `pause` seconds between steps, as long ones have."""
    import faulthandler

    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks
    from msprobe_megatron.topology import coordinates

    steps: list[int] = [0]
    last = coordinates.environment_rank() == int(os.environ["WORLD_SIZE"]) - 1

    def ready(chunks: Any, optimizer: Any) -> None:
        module = named(chunks, "decoder.layers.2.mlp")

        def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
            output, bias = original(*args, **kwargs)
            if steps[0] == at and last and fault == "nan":
                output = output.clone()
                output.view(-1)[0] = float("nan")
            if steps[0] == at and fault == "exception":
                raise ArithmeticError("the training script fails")
            return output, bias

        if module is not None:
            around(module, forward)

    def after(step: Any) -> None:
        steps[0] = step.iteration
        time.sleep(pause)
        if step.iteration == at and (fault == "signal" or (fault == "signal to one" and last)):
            os.kill(os.getpid(), signal.SIGUSR1)

    if fault.startswith("signal"):
        faulthandler.unregister(signal.SIGUSR1)
    callbacks = Callbacks(ready=ready, step=after)
    try:
        return run(argv, callbacks).losses
    except ArithmeticError:
        return []


def job(
    root: Path,
    layout: str,
    fault: str = "none",
    at: int = 7,
    probe: str = RECORDER,
    steps: int = 10,
    pause: float = 0.0,
) -> Path:
    """The run directory of a job."""
    out = root / f"{layout}_{fault}"
    config = root / f"{layout}_{fault}.yaml"
    config.write_text(probe)
    flags = flags_of("single", dropout=False) + LAYOUTS[layout].flags.split()
    flags += ["--train-iters", str(steps), "--no-check-for-nan-in-loss-and-grad"]
    flags += ["--msprobe-config", str(config), "--msprobe-output", str(out)]
    run_forked(LAYOUTS[layout].world, train, flags, fault, at, pause)
    return out


def hang(root: str, number: int) -> None:
    """Train in a process of its own that hangs when step 6 is over, and is sent a signal."""
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    config = Path(root) / "probe.yaml"
    config.write_text(RECORDER)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if the tests were started in the background

    def after(step: Any) -> None:
        if step.iteration == 7:
            os.kill(os.getpid(), number)
            time.sleep(600)

    flags = [*flags_of("single", dropout=False), "--train-iters", "10", "--msprobe-config", str(config)]
    run([*flags, "--msprobe-output", str(Path(root) / "out")], Callbacks(step=after))


def losses_without(layout: str, steps: int) -> list[list[float]]:
    """What the job gives without the kit."""
    flags = flags_of("single", dropout=False) + LAYOUTS[layout].flags.split() + ["--train-iters", str(steps)]
    return run_forked(LAYOUTS[layout].world, train, flags, "none", 0)
