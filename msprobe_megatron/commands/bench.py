"""`msprobe-megatron bench`: what the kit costs on this machine."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from msprobe_megatron.commands import CANNOT, OK

if TYPE_CHECKING:
    from msprobe_megatron.bench.options import Bench

HELP = "what the kit costs on this machine: CPU time of a training step with it over without it"
EXAMPLE = "msprobe-megatron bench dump --only h64 --out bench_out"
# What can be measured, and the module that does it (see bench/options.py).
BENCHES = {
    "dump": "msprobe_megatron.bench.dump",
    "compare": "msprobe_megatron.bench.compare",
    "monitor": "msprobe_megatron.bench.monitor",
    "perturb": "msprobe_megatron.bench.perturb",
    "scaling": "msprobe_megatron.bench.scaling",
    "volume": "msprobe_megatron.bench.volume",
    "layers": "msprobe_megatron.bench.layers",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("what", choices=list(BENCHES), help="the part to measure")
    parser.add_argument("--out", help="put the table (Markdown, JSON), its picture and the recorded runs here")
    parser.add_argument("--only", help="one workload, by name, such as h64")
    parser.add_argument("--turns", type=int, help="turns of each variant (default: those of the workload)")
    parser.add_argument("--ranks", type=int, help="processes (default: those of the bench)")
    parser.add_argument("--model", help="architecture instead of the demo GPT, where the bench has several")
    parser.add_argument("--profile", action="store_true", help="say where the time goes where a target is missed")
    parser.add_argument("--peer-python", help="interpreter that has mindstudio-probe: adds its column")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.bench.machine import machine
    from msprobe_megatron.bench.options import Options
    from msprobe_megatron.bench.profile import profiles
    from msprobe_megatron.report.bench import print_costs, write_costs

    chosen = cast("Bench", importlib.import_module(BENCHES[arguments.what]))
    with tempfile.TemporaryDirectory(prefix="msprobe_bench_") as temporary:
        options = Options(
            Path(arguments.out or temporary),
            arguments.only,
            arguments.turns,
            arguments.ranks,
            arguments.model,
            arguments.peer_python,
            _progress,
        )
        results = chosen.bench(options)
        if not results:
            print(f"bench {arguments.what}: nothing is called {arguments.only or arguments.model!r}", file=sys.stderr)
            return CANNOT
        report = {
            "bench": arguments.what,
            "command": _command(arguments),
            "machine": machine(),
            "about": chosen.ABOUT,
            "results": results,
        }
        if arguments.profile:
            report["profiles"] = profiles(chosen, results, options.out)
        if arguments.out:
            write_costs(report, Path(arguments.out))
    if arguments.json:
        print(json.dumps(report))
    else:
        print_costs(report)
    return OK


def _command(arguments: argparse.Namespace) -> str:
    """What was typed, without the places of this machine."""
    words = ["msprobe-megatron bench", arguments.what]
    for name in ("only", "turns", "ranks", "model"):
        value = getattr(arguments, name)
        words += [f"--{name} {value}"] if value is not None else []
    words += ["--peer-python PYTHON"] if arguments.peer_python else []
    return " ".join(words)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
