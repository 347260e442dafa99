"""`msprobe-megatron compare`: do two runs agree, and if not, where did they first diverge."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from msprobe_megatron.cli.commands import CANNOT, FOUND, OK

if TYPE_CHECKING:
    from msprobe_megatron.analysis.compare.compare import Comparison

HELP = "compare runs of any layouts with a golden one: agree, or where they first diverged"
EXAMPLE = "msprobe-megatron compare one_card tp2_pp2 --step 10"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("golden", metavar="GOLDEN", help="run directory of the reference run")
    parser.add_argument("paths", metavar="RUN", nargs="+", help="run directories to compare with it, each by itself")
    parser.add_argument("--step", type=int, default=None, help="only this step (default: all that both recorded)")
    parser.add_argument(
        "--noise",
        metavar="RUN2",
        help="a repetition of GOLDEN; its distance raises the tolerance, and if it is 0, bits decide",
    )
    parser.add_argument(
        "--specs", metavar="FILE", help="file with a shards section; overrides the recorded shard specs"
    )
    parser.add_argument(
        "--map",
        metavar="MAP",
        help="names of another implementation: hf:llama …, or a YAML file; found by itself for classes that are known",
    )
    parser.add_argument(
        "--no-tensors", action="store_true", help="compare statistics only, skip saved tensors (faster)"
    )
    parser.add_argument("--out", metavar="DIR", help="write compare.json and compare.parquet (every tensor) there")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code, the worst of several runs."""
    from msprobe_megatron.analysis.align.align import compare_aligned
    from msprobe_megatron.analysis.load.run import open_run
    from msprobe_megatron.config.sections.shards import load_shards
    from msprobe_megatron.report.terminal.compare import print_comparison, print_comparisons

    rules = load_shards(arguments.specs) if arguments.specs else ()
    noise = open_run(arguments.noise, rules) if arguments.noise else None
    golden = open_run(arguments.golden, rules)
    progress = _progress if sys.stderr.isatty() else None
    results = []
    for place, path in enumerate(arguments.paths):
        other = open_run(path, rules)
        result = compare_aligned(
            golden, other, arguments.map, arguments.step, noise, progress=progress, tensors=not arguments.no_tensors
        )
        results.append(result)
        if arguments.out:
            several = len(arguments.paths) > 1
            _write(results[-1], Path(arguments.out) / f"{place}_{Path(path).name}" if several else Path(arguments.out))
    if arguments.json:
        found = [result.as_dict() for result in results]
        print(json.dumps(found[0] if len(found) == 1 else {"golden": arguments.golden, "results": found}))
    elif len(results) == 1:
        print_comparison(results[0])
    else:
        print_comparisons(results)
    return max({"agree": OK, "diverged": FOUND}.get(result.verdict, CANNOT) for result in results)


def _write(result: Comparison, folder: Path) -> None:
    from msprobe_megatron.run_directory.directory import RunDirectory

    directory = RunDirectory.create(folder)
    directory.write_json("compare.json", result.as_dict())
    if result.table is not None:
        directory.write_table("compare.parquet", result.table)


def _progress(done: int, of: int) -> None:
    print(f"\r{done} of {of} tensors   ", end="\r", file=sys.stderr, flush=True)
