"""`msprobe-megatron docs`: the manual that was installed with the kit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from msprobe_megatron.cli.commands import OK

HELP = "the manual: list its pages, or print one"
EXAMPLE = "msprobe-megatron docs; msprobe-megatron docs walkthroughs | less"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("page", nargs="?", metavar="PAGE", help="page to print, such as alerts or hosts/verl")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.config.document import ConfigError, did_you_mean
    from msprobe_megatron.hosts.launching.shipped import shipped

    root = shipped("docs")
    pages = {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.rglob("*.md"))}
    if arguments.page is None:
        print(json.dumps({name: str(path) for name, path in pages.items()}) if arguments.json else _list(pages, root))
        return OK
    name = arguments.page.removesuffix(".md")
    if name not in pages:
        raise ConfigError(f"docs: {name!r} is no page{did_you_mean(name, pages)}; accepted: {', '.join(pages)}")
    text = pages[name].read_text(encoding="utf-8")
    print(json.dumps({"file": str(pages[name]), "text": text}) if arguments.json else text.rstrip("\n"))
    return OK


def _list(pages: dict[str, Path], root: Path) -> str:
    return "\n".join([f"pages in {root}:", *(f"  {name}" for name in pages)])
