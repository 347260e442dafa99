"""`msprobe-megatron bench`: what the kit costs on this machine."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msprobe_megatron.cli.commands import CANNOT, OK

if TYPE_CHECKING:
    from msprobe_megatron.lab.bench.options import Bench, Options

HELP = "what the kit costs on this machine: CPU time of a training step with it over without it"
EXAMPLE = "msprobe-megatron bench dump --only h64 --out bench_out"
# What can be measured, and the module that does it (see bench/options.py).
BENCHES = {
    "dump": "msprobe_megatron.lab.bench.tables.dump",
    "compare": "msprobe_megatron.lab.bench.tables.compare",
    "counts": "msprobe_megatron.lab.bench.tables.counts",
    "monitor": "msprobe_megatron.lab.bench.tables.monitor",
    "perturb": "msprobe_megatron.lab.bench.tables.perturb",
    "scaling": "msprobe_megatron.lab.bench.tables.scaling",
    "volume": "msprobe_megatron.lab.bench.tables.volume",
    "layers": "msprobe_megatron.lab.bench.tables.layers",
    "device": "msprobe_megatron.lab.bench.tables.device",
}
# These have one model of their own.
_NO_MODEL = ("compare", "counts", "layers", "device")
# Every line has these, empty where they have no meaning for it.
KEYS = ("name", "ratio", "median_s", "spread", "peak_bytes", "bytes", "files")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("what", choices=list(BENCHES), help="the part to measure")
    parser.add_argument("--out", help="put the table (Markdown, JSON), its picture and the recorded runs here")
    parser.add_argument("--only", help="one workload, by name, such as h64")
    parser.add_argument("--turns", type=_count, help="turns of each variant (default: those of the workload)")
    parser.add_argument("--ranks", type=_count, help="processes (default: those of the bench)")
    parser.add_argument(
        "--model",
        help="another model than the demo GPT: a name such as llama2 (a wrong one lists them), all,"
        ' or flags of Megatron: --model="--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64"',
    )
    parser.add_argument("--profile", action="store_true", help="say where the time goes where a target is missed")
    parser.add_argument("--peer-python", help="interpreter that has mindstudio-probe: adds its column")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are whole numbers from 1 to 65536")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.lab.bench.options import Options
    from msprobe_megatron.lab.bench.peer.columns import check_peer
    from msprobe_megatron.report.terminal.bar import Bar
    from msprobe_megatron.report.terminal.bench import print_costs, write_costs

    if arguments.model and arguments.what in _NO_MODEL:
        print(
            f"bench {arguments.what} has no --model; those that have: dump monitor perturb scaling volume",
            file=sys.stderr,
        )
        return CANNOT
    peer = check_peer(arguments.peer_python) if arguments.peer_python else None
    with tempfile.TemporaryDirectory(prefix="msprobe_bench_") as temporary, Bar() as bar:
        try:
            runs = _runs_folder(arguments) if arguments.out else Path(temporary)
            options = Options(
                runs,
                arguments.only,
                arguments.turns,
                arguments.ranks,
                arguments.model,
                arguments.peer_python,
                bar,
            )
            report = _report(arguments, options, peer)
            if arguments.out and report["results"]:
                write_costs(report, Path(arguments.out))
        except OSError as error:
            print(f"bench {arguments.what}: {error.filename or arguments.out}: {error.strerror}", file=sys.stderr)
            return CANNOT
    if not report["results"]:
        print(f"bench {arguments.what}: nothing is called {arguments.only or arguments.model!r}", file=sys.stderr)
        return CANNOT
    if arguments.json:
        print(json.dumps(report))
    else:
        print_costs(report)
    return OK


def _report(arguments: argparse.Namespace, options: Options, peer: str | None) -> dict[str, Any]:
    from msprobe_megatron.lab.bench.clockwork.machine import machine
    from msprobe_megatron.lab.bench.profiles.profile import profiles

    chosen = cast("Bench", importlib.import_module(BENCHES[arguments.what]))
    results = [{**dict.fromkeys(KEYS), **line} for line in chosen.bench(options)]
    report = {
        "bench": arguments.what,
        "file": _stem(arguments),
        "command": _command(arguments),
        "machine": machine(),
        "peer": peer,
        "about": chosen.ABOUT,
        "results": results,
    }
    if arguments.profile:
        report["profiles"] = profiles(chosen, results, options.out, options.progress)
    return report


def _stem(arguments: argparse.Namespace) -> str:
    """Name of the files: parts of a bench stand beside each other."""
    words = [arguments.what, arguments.model, arguments.only]
    return "_".join(re.sub(r"\W+", "_", word).strip("_") for word in words if word)


def _runs_folder(arguments: argparse.Namespace) -> Path:
    """Where the runs go that are recorded; those of an earlier call make room."""
    folder = Path(arguments.out) / "runs" / _stem(arguments)
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _command(arguments: argparse.Namespace) -> str:
    """What was typed, without the places of this machine."""
    words = ["msprobe-megatron bench", arguments.what]
    for name in ("only", "turns", "ranks", "model"):
        value = getattr(arguments, name)
        words += [f'--{name}="{value}"' if " " in str(value) else f"--{name} {value}"] if value is not None else []
    words += ["--peer-python PYTHON"] if arguments.peer_python else []
    return " ".join(words)
