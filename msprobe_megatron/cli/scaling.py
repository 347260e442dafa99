"""`msprobe-megatron scaling`: speed-up and efficiency over the number of cards, from finished runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from msprobe_megatron.cli.commands import OK

HELP = "speed, memory, speed-up and parallel efficiency of runs with different numbers of cards"
EXAMPLE = "msprobe-megatron scaling run_1x1 run_1x8 run_2x8 --loss 2.5 --out scaling_out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument(
        "paths", metavar="RUN", nargs="+", help="run directories of jobs with monitor: in the probe file"
    )
    parser.add_argument("--loss", type=float, help="also print the time until the loss was at most this")
    parser.add_argument("--out", help="directory for the table (Markdown, JSON) and a plot")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.analysis.diagnose.throughput import scaling
    from msprobe_megatron.analysis.load.run import open_run
    from msprobe_megatron.report.terminal.scaling import print_scaling, write_scaling

    lines = scaling([open_run(path) for path in arguments.paths], arguments.loss)
    if arguments.out:
        write_scaling(lines, Path(arguments.out))
    if arguments.json:
        print(json.dumps({"results": [line.as_dict() for line in lines]}))
    else:
        print_scaling(lines)
    return OK
