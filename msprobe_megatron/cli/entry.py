"""The command line: ``msprobe-megatron COMMAND``.

Every command has `--help` with an example and `--json` for machines; exit code 0 is fine, 1 found something, 2 cannot
do it. Each imports what it needs when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Sequence

from msprobe_megatron import __version__
from msprobe_megatron.commands import CANNOT, COMMANDS, MODULES, OK
from msprobe_megatron.report.harmless import harmless


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code.

    Example::

        main(["validate", "probe.yaml"])
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name outside the locale's letters is no reason to stop
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
        text = _for_the_user(error)
        if text is None:
            raise
        print(f"msprobe-megatron: {harmless(text)}", file=sys.stderr)
        return CANNOT


_READERS = ("duckdb", "_duckdb", "pyarrow")


def _raised_in(error: Exception) -> str:
    """The package whose code raised: readers of files answer to some damage with bare RuntimeErrors."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0]


def _for_the_user(error: Exception) -> str | None:
    """What to print instead of a traceback, for errors that are about the user's files and not about our code."""
    module = type(error).__module__.partition(".")[0]
    if module == "msprobe_megatron":
        return str(error)
    damaged_text = isinstance(error, UnicodeDecodeError)  # names and words of rows, wherever they are looked at
    if damaged_text or module in _READERS or _raised_in(error) in _READERS:
        return f"a file of rows is damaged or not one of ours: {' '.join(str(error).split())[:200]}"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="msprobe-megatron",
        description="Numerical probe for Megatron training jobs.",
        epilog="A job is probed with: torchrun ... -m msprobe_megatron.run pretrain_gpt.py ... --msprobe-config FILE",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"msprobe_megatron.commands.{MODULES.get(name, name.replace('-', '_'))}")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=f"example: {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", action="store_true", help="print JSON for machines")
        command.set_defaults(run=module.run)
        module.add_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
