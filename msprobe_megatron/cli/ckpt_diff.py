"""`msprobe-megatron ckpt-diff`: two checkpoints of any two layouts and formats, tensor by tensor."""

from __future__ import annotations

import argparse
import json
import sys

from msprobe_megatron.cli.commands import FOUND, OK

HELP = "compare two checkpoints: of Megatron in any two layouts and formats, or of Hugging Face (safetensors)"
EXAMPLE = "msprobe-megatron ckpt-diff checkpoints/tp1 checkpoints/tp8_pp4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument(
        "left", metavar="A", help="checkpoint (iter_NNNNNNN), or the directory of checkpoints (then the latest)"
    )
    parser.add_argument("right", metavar="B", help="the other checkpoint")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative error that counts as equal (default 0)")
    parser.add_argument("--all", action="store_true", help="list every tensor that differs, not only the first 20")
    parser.add_argument(
        "--map", metavar="MAP", help="names of Hugging Face: hf:llama …, or a YAML file (default: by config.json)"
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="read files that name classes which are not Megatron's, NumPy's or torch's; they are never executed",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code: 1 if anything differs."""
    from msprobe_megatron.analysis.checkpoints.differ import diff
    from msprobe_megatron.analysis.checkpoints.opening import open_checkpoint
    from msprobe_megatron.report.terminal.ckpt_diff import print_diff

    left, right = (open_checkpoint(path, arguments.trust) for path in (arguments.left, arguments.right))
    result = diff(left, right, arguments.tolerance, _progress if sys.stderr.isatty() else None, arguments.map)
    if arguments.json:
        print(json.dumps(result.as_dict()))
    else:
        print_diff(result.as_dict(), everything=arguments.all)
    return OK if all(state == "equal" for state, count in result.counts.items() if count) else FOUND


def _progress(done: int, of: int) -> None:
    print(f"\r{done} of {of} tensors   ", end="\r", file=sys.stderr, flush=True)
