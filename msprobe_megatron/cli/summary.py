"""`msprobe-megatron summary`: what a run recorded."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.cli.commands import FOUND, OK

HELP = "what a run recorded"
EXAMPLE = "msprobe-megatron summary probe_out --step 10"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("path", metavar="RUN", help="run directory")
    parser.add_argument("--step", type=int, default=None, help="only this step")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.analysis.diagnose.summary import summarise
    from msprobe_megatron.analysis.load.run import open_run
    from msprobe_megatron.report.terminal.tables import print_summary

    summary = summarise(open_run(arguments.path), arguments.step)
    if arguments.json:
        print(json.dumps(summary.as_dict()))
    else:
        print_summary(summary)
    return FOUND if summary.warnings else OK
