"""`msprobe-megatron overlays`: the models whose launch recipes come with settings."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.cli.commands import OK

HELP = "list the overlays for launch recipes, or print one as a start for your own"
EXAMPLE = "msprobe-megatron overlays; msprobe-megatron overlays modellink/llama2_7b > mine.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this one: HOST/MODEL, or MODEL alone")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.hosts.launching.overlays import all_overlays, find
    from msprobe_megatron.hosts.launching.shipped import recipes

    root = recipes()
    if arguments.name:
        path = root / f"{find(arguments.name, root).name}.yaml"
        text = path.read_text(encoding="utf-8")
        print(json.dumps({"file": str(path), "text": text}) if arguments.json else text.rstrip("\n"))
        return OK
    overlays = all_overlays(root)
    if arguments.json:
        print(json.dumps([{"name": overlay.name, "title": overlay.title} for overlay in overlays]))
    else:
        for overlay in overlays:
            print(f"{overlay.name:32} {overlay.title}")
    return OK
