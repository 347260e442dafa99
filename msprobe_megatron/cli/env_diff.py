"""`msprobe-megatron env-diff`: settings in which two jobs differ, by effect on the numerics."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.cli.commands import FOUND, OK

HELP = "arguments, environment, versions, sources, weights and data in which two jobs differ, by effect on the numerics"
EXAMPLE = "msprobe-megatron env-diff one_card tp2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("left", metavar="A", help="run directory, or launch script")
    parser.add_argument("right", metavar="B", help="run directory, or launch script")
    parser.add_argument("--all", action="store_true", help="also show settings without effect on the numerics")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code: 1 if a setting differs that can change a number."""
    from msprobe_megatron.analysis.settings.env_diff import Start, env_diff
    from msprobe_megatron.report.terminal.env_diff import print_env_diff

    result = env_diff(Start.read(arguments.left), Start.read(arguments.right))
    if arguments.json:
        print(json.dumps(result.as_dict()))
    else:
        print_env_diff(result, everything=arguments.all)
    return FOUND if result.matters else OK
