"""`msprobe-megatron validate`: check a probe file."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.cli.commands import OK

HELP = "check a probe file"
EXAMPLE = "msprobe-megatron validate probe.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("file", nargs="?", help="probe file (YAML, JSON, or msprobe's config.json)")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of probe files, for editors")
    parser.add_argument("--reference", action="store_true", help="print every key, its default and what it accepts")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.config import ConfigError, describe, load
    from msprobe_megatron.config.reference import reference

    if arguments.schema:
        from msprobe_megatron.config.json_schema import json_schema

        print(json.dumps(json_schema(), indent=2))
        return OK
    if arguments.reference:
        print(reference(), end="")
        return OK
    if arguments.file is None:
        raise ConfigError("validate: no file is named; accepted: FILE, --reference for every key, --schema for editors")
    config = load(arguments.file)
    if arguments.json:
        print(json.dumps({"file": arguments.file, "valid": True, "notes": list(config.notes)}))
    else:
        print(describe(config))
    return OK
