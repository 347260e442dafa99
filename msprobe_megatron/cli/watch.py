"""`msprobe-megatron watch`: a running job in the terminal."""

from __future__ import annotations

import argparse
import json
import time

from msprobe_megatron.commands import FOUND, OK

HELP = "a running job: loss, gradient norm, every layer, the last alerts"
EXAMPLE = "msprobe-megatron watch probe_out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("path", metavar="RUN", help="run directory")
    parser.add_argument("--once", action="store_true", help="print one view and end (exit 1 if there were alerts)")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="look again after this (2)")
    parser.add_argument("--steps", type=int, default=60, help="how many of the last watched steps (60)")
    parser.add_argument("--of", choices=("gradients", "activations"), default=None, help="what is shown of the layers")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from rich.live import Live as Screen

    from msprobe_megatron.analyse.live import look
    from msprobe_megatron.report.terminal import console
    from msprobe_megatron.report.terminal_watch import screen

    steps = max(arguments.steps, 2)
    live = look(arguments.path, steps, arguments.of)
    if arguments.json:
        print(json.dumps(live.as_dict()))
        return FOUND if live.alerts else OK
    out = console()
    if arguments.once or not out.is_terminal:
        out.print(screen(live))
        return FOUND if live.alerts else OK
    with Screen(screen(live), console=out, auto_refresh=False, screen=True) as view:
        while True:
            time.sleep(max(arguments.every, 0.2))
            view.update(screen(look(arguments.path, steps, arguments.of)), refresh=True)
