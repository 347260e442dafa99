"""`msprobe-megatron weights`: digests of all weights of a run or checkpoint, written as a manifest or checked."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.cli.commands import FOUND, OK

HELP = "write a manifest of digests of all weights, or check a run or checkpoint against one"
EXAMPLE = "msprobe-megatron weights checkpoints/iter_0000100 --manifest weights.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("path", metavar="PATH", help="run directory, or checkpoint of Megatron or Hugging Face")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--manifest", metavar="FILE", help="write the manifest there")
    what.add_argument("--check", metavar="FILE", help="check against this manifest")
    parser.add_argument("--map", metavar="MAP", help="names of Hugging Face: hf:llama …, or a YAML file")
    parser.add_argument("--lossy", nargs="*", default=[], metavar="NAME", help="parts of names that are quantised")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code: 1 if weights differ from the manifest."""
    from msprobe_megatron.analysis.align import manifest
    from msprobe_megatron.run_directory.safe_files import json_text

    found = manifest.digests(arguments.path, arguments.map)
    if arguments.manifest:
        with open(arguments.manifest, "w", encoding="ascii") as file:
            file.write(json_text(manifest.as_manifest(found, arguments.path), indent=1))
        print(json.dumps({"weights": len(found)}) if arguments.json else f"{len(found)} weights: {arguments.manifest}")
        return OK
    result = manifest.differences(manifest.read_manifest(arguments.check), found, arguments.lossy)
    wrong = [name for key in ("differ", "missing", "unexpected") for name in result[key]]
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"{len(found) - len(result['differ']) - len(result['unexpected'])} equal, {len(wrong)} not")
        for key in ("differ", "missing", "unexpected"):
            for name in result[key][:20]:
                print(f"  {key}: {name}")
    return FOUND if wrong else OK
