"""`msprobe-megatron import`: msprobe's dumps as a run directory."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.cli.commands import OK

HELP = "read a msprobe dump (step*/rank*/dump.json) into a run directory"
EXAMPLE = "msprobe-megatron import msprobe_out --out imported"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("path", metavar="DIR", help="dump_path of msprobe")
    parser.add_argument("--out", required=True, help="run directory to make")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.report.msprobe.importer import import_msprobe

    counts = import_msprobe(arguments.path, arguments.out)
    if arguments.json:
        print(json.dumps({"out": arguments.out, **counts}))
    else:
        print(f"{counts['rows']:,} rows of {counts['steps']} steps and {counts['ranks']} ranks; look at them:")
        print(f"  msprobe-megatron summary {arguments.out}")
    return OK
