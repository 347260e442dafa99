"""`msprobe-megatron patches`: list the patches: which bind to the installed Megatron, or what they did in a run."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.cli.commands import OK

HELP = "list the patches: which bind to the installed Megatron, or what they did in a run"
EXAMPLE = "msprobe-megatron patches; msprobe-megatron patches probe_out --rank 3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("path", nargs="?", metavar="RUN", help="run directory; without it the installed megatron-core")
    parser.add_argument("--rank", type=int, default=None, help="rank of the run (default: the lowest)")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.analysis.load.run import RunError, open_run
    from msprobe_megatron.report.terminal.tables import print_ledger

    if arguments.path is None:
        from msprobe_megatron.job.patching.dry_run import installed_patches

        lines, title = installed_patches()
    else:
        run = open_run(arguments.path)
        rank = arguments.rank if arguments.rank is not None else min(run.ranks, default=0)
        if rank not in run.ranks:
            raise RunError(f"{run.path}: no ledger of rank {rank}; accepted: {sorted(run.ranks)}")
        lines, title = run.ranks[rank].get("ledger", {}).get("patches", []), f"{run.path}, rank {rank}"
    if arguments.json:
        print(json.dumps(lines))
    else:
        print_ledger(lines, title)
    return OK
