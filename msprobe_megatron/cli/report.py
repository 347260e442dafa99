"""`msprobe-megatron report`: one self-contained HTML file."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.cli.commands import FOUND, OK

HELP = "one self-contained HTML page of a run, alone or beside a golden run"
EXAMPLE = "msprobe-megatron report probe_out --against golden_out --out report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("path", metavar="RUN", help="run directory")
    parser.add_argument("--against", metavar="GOLDEN", help="run directory of the reference run")
    parser.add_argument("--out", metavar="FILE", default="report.html", help="page to write (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.analysis.load.run import open_run
    from msprobe_megatron.analysis.page.page_data import page_data
    from msprobe_megatron.report.files.files import write_whole
    from msprobe_megatron.report.html.page import page
    from msprobe_megatron.report.terminal.page import print_verdict

    golden = open_run(arguments.against) if arguments.against else None
    data = page_data(open_run(arguments.path), golden)
    size = write_whole(arguments.out, page(data).encode("utf-8"))
    verdict = data["verdict"]
    if arguments.json:
        print(json.dumps({"page": arguments.out, "bytes": size, "verdict": verdict}))
    else:
        print_verdict(verdict)
        print(f"page: {arguments.out} ({size / 1e6:.1f} MB)")
    return OK if verdict["tone"] == "good" else FOUND
