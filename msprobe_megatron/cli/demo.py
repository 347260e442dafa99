"""`msprobe-megatron demo`: train a tiny GPT on this machine under the probe."""

from __future__ import annotations

import argparse

HELP = "train a tiny GPT on this machine under the probe"
EXAMPLE = "msprobe-megatron demo --out demo_out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("--out", default="demo_out", help="run directory (default: %(default)s)")
    parser.add_argument("--config", help="probe file (default: L0 statistics of steps 0 and 2)")
    parser.set_defaults(takes_rest=True)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.lab.demo.showcase import showcase

    return showcase(arguments.out, arguments.config, arguments.rest, as_json=arguments.json)
