"""`msprobe-megatron diagnose`: what is wrong with one run, and where it began."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.cli.commands import FOUND, OK

HELP = "what is wrong with one run: first NaN and its source, replicas that differ, skipped steps"
EXAMPLE = "msprobe-megatron diagnose probe_out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("path", metavar="RUN", help="run directory")
    parser.add_argument("--step", type=int, default=None, help="only this step")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.analysis.diagnose.diagnose import diagnose
    from msprobe_megatron.analysis.load.run import open_run
    from msprobe_megatron.report.terminal.diagnose import print_diagnosis

    result = diagnose(open_run(arguments.path), arguments.step)
    if arguments.json:
        print(json.dumps(result.as_dict()))
    else:
        print_diagnosis(result)
    return FOUND if result.findings else OK
