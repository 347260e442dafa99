"""`msprobe-megatron validate`: check a probe file."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.commands import OK

HELP = "check a probe file"
EXAMPLE = "msprobe-megatron validate probe.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("file", help="probe file (YAML, JSON, or msprobe's config.json)")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.config import describe, load

    config = load(arguments.file)
    if arguments.json:
        print(json.dumps({"file": arguments.file, "valid": True, "notes": list(config.notes)}))
    else:
        print(describe(config))
    return OK
