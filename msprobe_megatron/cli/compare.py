"""`msprobe-megatron compare`: are two runs the same computation, and if not, where did it first go wrong."""

from __future__ import annotations

import argparse
import json
import sys

from msprobe_megatron.commands import CANNOT, FOUND, OK

HELP = "compare two runs of any two layouts: agree, or where they first diverged"
EXAMPLE = "msprobe-megatron compare one_card tp2_pp2 --step 10"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("golden", metavar="GOLDEN", help="run directory that is taken to be right")
    parser.add_argument("path", metavar="RUN", help="run directory to compare with it")
    parser.add_argument("--step", type=int, default=None, help="only this step (default: all that both recorded)")
    parser.add_argument("--noise", metavar="RUN2", help="a repetition of GOLDEN: its distance raises the tolerance")
    parser.add_argument("--specs", metavar="FILE", help="shards: how tensors lie over ranks, over what was recorded")
    parser.add_argument("--no-tensors", action="store_true", help="leave saved tensors unread: rows only, quicker")
    parser.add_argument("--out", metavar="DIR", help="write compare.json and compare.parquet (every tensor) there")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.analyse.compare import compare
    from msprobe_megatron.analyse.load import open_run
    from msprobe_megatron.config.shards import load_shards
    from msprobe_megatron.record.directory import RunDirectory
    from msprobe_megatron.report.terminal_compare import print_comparison

    rules = load_shards(arguments.specs) if arguments.specs else ()
    noise = open_run(arguments.noise, rules) if arguments.noise else None
    golden, path = open_run(arguments.golden, rules), open_run(arguments.path, rules)
    progress = _progress if sys.stderr.isatty() else None
    result = compare(golden, path, arguments.step, noise, progress, tensors=not arguments.no_tensors)
    if arguments.out:
        directory = RunDirectory.create(arguments.out)
        directory.write_json("compare.json", result.as_dict())
        if result.table is not None:
            directory.write_table("compare.parquet", result.table)
    if arguments.json:
        print(json.dumps(result.as_dict()))
    else:
        print_comparison(result)
    return {"agree": OK, "diverged": FOUND}.get(result.verdict, CANNOT)


def _progress(done: int, of: int) -> None:
    print(f"\r{done} of {of} tensors   ", end="\r", file=sys.stderr, flush=True)
