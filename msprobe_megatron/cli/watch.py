"""`msprobe-megatron watch`: a running job in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from msprobe_megatron.cli.commands import CANNOT, FOUND, OK

if TYPE_CHECKING:
    from msprobe_megatron.analysis.load.live import Live

HELP = "a running job: loss, gradient norm, every layer, the last alerts"
EXAMPLE = "msprobe-megatron watch probe_out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("path", metavar="RUN", help="run directory")
    parser.add_argument(
        "--once", action="store_true", help="print one view and exit (exit code 1 if there were alerts)"
    )
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="refresh interval (2)")
    parser.add_argument("--steps", type=int, default=60, help="number of last monitored steps to show (60)")
    parser.add_argument("--of", choices=("gradients", "activations"), default=None, help="what to show per layer")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from rich.live import Live as Screen

    from msprobe_megatron.analysis.load.live import look
    from msprobe_megatron.analysis.load.run import RunError
    from msprobe_megatron.report.terminal.tables import console
    from msprobe_megatron.report.terminal.watch import screen

    steps = max(arguments.steps, 2)
    out = console()
    waits = not (arguments.json or arguments.once) and out.is_terminal
    every = max(arguments.every, 0.2)
    if waits:
        _wait_for(Path(arguments.path), every)
    live = look(arguments.path, steps, arguments.of)
    if not live.steps and not live.monitored:
        raise RunError(f"{arguments.path}: has no monitor to watch; accepted: a run with a monitor section")
    if arguments.json:
        print(json.dumps(live.as_dict()))
        return _code(live)
    if waits and not live.ended:
        with Screen(screen(live), console=out, auto_refresh=False, screen=True) as view:
            while not live.ended:
                time.sleep(every)
                live = look(arguments.path, steps, arguments.of)
                view.update(screen(live), refresh=True)
    # The last view stays on the terminal.
    out.print(screen(live))
    return _code(live)


def _code(live: Live) -> int:
    return FOUND if live.alerts else OK if live.steps else CANNOT


def _wait_for(path: Path, every: float) -> None:
    """Until the job has made its run directory."""
    told = False
    while not (path / "run.json").is_file():
        if not told:
            print(f"msprobe-megatron: waiting for {path}/run.json, which the job makes; Ctrl-C ends", file=sys.stderr)
            told = True
        time.sleep(every)
