"""The command line: ``msprobe-megatron COMMAND``.

Every command has `--help` with an example and `--json` for machines; exit code 0 is fine, 1 found something, 2 cannot
do it. Each imports what it needs when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from msprobe_megatron import __version__

OK, FOUND, CANNOT = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code.

    Example::

        main(["validate", "probe.yaml"])
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not getattr(arguments, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:
        return OK
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not _is_ours(error):
            raise
        print(f"msprobe-megatron: {error}", file=sys.stderr)
        return CANNOT


def _is_ours(error: Exception) -> bool:
    """Errors that are made for the user: their text says what to change."""
    return type(error).__module__.startswith("msprobe_megatron.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="msprobe-megatron",
        description="Numerical probe for Megatron training jobs.",
        epilog="A job is probed with: torchrun ... -m msprobe_megatron.run pretrain_gpt.py ... --msprobe-config FILE",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], text: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print JSON for machines")
        return sub

    demo = command(
        "demo", _demo, "train a tiny GPT on this machine under the probe", "msprobe-megatron demo --out demo_out"
    )
    demo.add_argument("--out", default="demo_out", help="run directory (default: %(default)s)")
    demo.add_argument("--config", help="probe file (default: L0 statistics of steps 0 and 2)")
    demo.set_defaults(takes_rest=True)
    validate = command("validate", _validate, "check a probe file", "msprobe-megatron validate probe.yaml")
    validate.add_argument("file", help="probe file (YAML, JSON, or msprobe's config.json)")
    patches = command(
        "patches",
        _patches,
        "list the patches: which bind to the installed Megatron, or what they did in a run",
        "msprobe-megatron patches; msprobe-megatron patches probe_out --rank 3",
    )
    patches.add_argument("path", nargs="?", metavar="RUN", help="run directory; without it the installed megatron-core")
    patches.add_argument("--rank", type=int, default=None, help="rank of the run (default: the lowest)")
    summary = command("summary", _summary, "what a run recorded", "msprobe-megatron summary probe_out --step 10")
    summary.add_argument("path", metavar="RUN", help="run directory")
    summary.add_argument("--step", type=int, default=None, help="only this step")
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from msprobe_megatron.demo.showcase import showcase

    return showcase(arguments.out, arguments.config, arguments.rest, as_json=arguments.json)


def _validate(arguments: argparse.Namespace) -> int:
    from msprobe_megatron.config import describe, load

    config = load(arguments.file)
    if arguments.json:
        print(json.dumps({"file": arguments.file, "valid": True, "notes": list(config.notes)}))
    else:
        print(describe(config))
    return OK


def _patches(arguments: argparse.Namespace) -> int:
    from msprobe_megatron.analyse.load import RunError, open_run
    from msprobe_megatron.report.terminal import print_ledger

    if arguments.path is None:
        from msprobe_megatron.dry_run import installed_patches

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


def _summary(arguments: argparse.Namespace) -> int:
    from msprobe_megatron.analyse.load import open_run
    from msprobe_megatron.analyse.summary import summarise
    from msprobe_megatron.report.terminal import print_summary

    summary = summarise(open_run(arguments.path), arguments.step)
    if arguments.json:
        print(json.dumps(summary.as_dict()))
    else:
        print_summary(summary)
    return FOUND if summary.warnings else OK


if __name__ == "__main__":
    sys.exit(main())
