"""`msprobe-megatron bench`: what the kit costs on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from msprobe_megatron.commands import OK

HELP = "what the kit costs on this machine: CPU time of a training step with it over without it"
EXAMPLE = "msprobe-megatron bench dump --only h64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("what", choices=["dump"], help="the part to measure")
    parser.add_argument("--out", help="keep the recorded runs here (default: a temporary directory, removed)")
    parser.add_argument("--only", choices=["h64", "h1024"], help="one of the two workloads")
    parser.add_argument("--turns", type=int, help="turns of each variant (default: 15 of h64, 5 of h1024)")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from dataclasses import replace

    from msprobe_megatron.bench.dump import WORKLOADS, measure
    from msprobe_megatron.report.bench import print_costs

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text}   ", end="", file=sys.stderr, flush=True)

    results = []
    with tempfile.TemporaryDirectory(prefix="msprobe_bench_") as temporary:
        out = Path(arguments.out or temporary)
        for name, workload in WORKLOADS.items():
            if arguments.only in (None, name):
                chosen = replace(workload, turns=arguments.turns) if arguments.turns else workload
                results += measure(chosen, out, progress)
    lines = [result.as_dict() for result in results]
    if arguments.json:
        print(json.dumps({"results": lines}))
    else:
        print_costs(lines)
    return OK
