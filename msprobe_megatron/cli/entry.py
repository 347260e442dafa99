"""The command line: ``msprobe-megatron COMMAND``.

Every command has `--help` with an example and `--json` for machines; exit code 0 means no findings, 1 findings,
2 an error. Only the command that is called is imported, and it imports what it needs when it runs, so `--help` is fast.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, cast

from msprobe_megatron import __version__
from msprobe_megatron.cli.commands import CANNOT, COMMANDS, GROUPS, MODULES, OK
from msprobe_megatron.config.document import did_you_mean

_EPILOG = """\
A job is probed with: torchrun ... -m msprobe_megatron.run pretrain_gpt.py ... --msprobe-config FILE
Every command has --help with an example, and --json. Exit codes: 0 fine, 1 found something, 2 cannot do it."""


class _Command(Protocol):
    """The module of a command."""

    HELP: str
    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's own arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; returns the exit code."""


class UsageError(Exception):
    """A command line that cannot be read; the usage of the command at fault goes with it."""

    def __init__(self, message: str, usage: str, prog: str) -> None:
        super().__init__(message)
        self.usage, self.prog = usage, prog


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, and that suggests the closest word."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`."""
        raise UsageError(message, self.format_usage(), self.prog)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if choices and str(value) not in choices:
            problem = f"{value!r} is not known{did_you_mean(str(value), choices)}; accepted: {', '.join(choices)}"
            raise argparse.ArgumentError(action, problem)

    def refuse_misspelt(self, words: Sequence[str]) -> None:
        """Refuse a flag that is close to a known one before another is found missing for want of it."""
        if self.get_default("takes_rest") or any(action.nargs == argparse.REMAINDER for action in self._actions):
            return
        known = self._option_string_actions
        unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
        close = [word for word in unknown if did_you_mean(word.partition("=")[0], list(known))]
        if close:
            self.refuse(close)

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Raise `UsageError` for words that no argument takes."""
        known = list(self._option_string_actions)
        hints = [word + did_you_mean(word.partition("=")[0], known) * word.startswith("-") for word in words]
        self.error(f"unrecognized arguments: {' '.join(hints)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. A command line that cannot be read ends in `SystemExit`, as argparse has it.

    Example::

        >>> main(["validate", "probe.yaml"])
        2
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name outside the locale's letters is no reason to stop
    words = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in words[: words.index("--") if "--" in words else None]
    try:
        return _call(words)
    except BrokenPipeError:
        return OK
    except KeyboardInterrupt:
        return 130
    except UsageError as error:
        if not _refused(as_json, str(error)):
            print(f"{error.usage}{error.prog}: error: {error}", file=sys.stderr)
        raise SystemExit(CANNOT) from None
    except Exception as error:
        text = _for_the_user(error)
        if text is None:
            raise
        from msprobe_megatron.report.terminal.tables import harmless

        if not _refused(as_json, text):
            print(f"msprobe-megatron: {harmless(text)}", file=sys.stderr)
    return CANNOT


def _call(words: list[str]) -> int:
    """Run one command; the others are not imported."""
    name = next((word for word in words if not word.startswith("-")), None)
    if name is None or words[0] != name:
        top = _top_parser()
        top.parse_args(words)  # --help and --version end here
        top.error("which command? Accepted: " + ", ".join(COMMANDS))
    if name not in COMMANDS:
        _top_parser().error(f"{name!r} is no command{did_you_mean(name, COMMANDS)}; accepted: {', '.join(COMMANDS)}")
    parser = command_parser(name)
    parser.refuse_misspelt(words[1:])
    arguments, rest = parser.parse_known_args(words[1:])
    if rest and not getattr(arguments, "takes_rest", False):
        parser.refuse(rest)
    arguments.rest = rest
    return int(arguments.run(arguments))


def _refused(as_json: bool, text: str) -> bool:
    """Say what is wrong in JSON, where that was asked for."""
    if as_json:
        print(json.dumps({"error": " ".join(text.split())}))
    return as_json


_READERS = ("duckdb", "_duckdb", "pyarrow")


def _raised_in(error: Exception) -> str:
    """The package whose code raised: file readers report some damage as bare RuntimeErrors."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0]


def _for_the_user(error: Exception) -> str | None:
    """The message to print instead of a traceback if the error is about the user's files, not our code."""
    module = type(error).__module__.partition(".")[0]
    if module == "msprobe_megatron":
        return str(error)
    if isinstance(error, RuntimeError) and _raised_in(error) == "torch" and "backend extension" in str(error):
        # An extension such as torch_npu that is installed on a machine without its libraries: torch loads it by itself.
        return f"torch cannot be imported by {sys.executable}: {' '.join(str(error).split())}"
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package and package != "msprobe_megatron":
            return (
                f"this command needs {package}, which {sys.executable} does not have; accepted: an environment with it"
            )
    damaged_text = isinstance(error, UnicodeDecodeError)  # text columns of damaged rows
    if damaged_text or module in _READERS or _raised_in(error) in _READERS:
        return f"a file of rows is damaged or not one of ours: {' '.join(str(error).split())[:200]}"
    return None


def _module(name: str) -> _Command:
    path = f"msprobe_megatron.cli.{MODULES.get(name, name.replace('-', '_'))}"
    return cast("_Command", importlib.import_module(path))


def command_parser(name: str) -> Parser:
    """The parser of one command."""
    module = _module(name)
    parser = Parser(
        prog=f"msprobe-megatron {name}",
        description=module.HELP,
        epilog=f"example: {module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.set_defaults(run=module.run, command=name)
    module.add_arguments(parser)
    return parser


class _TopParser(Parser):
    """The parser of what stands before a command; its help lists the commands."""

    def format_help(self) -> str:
        lines = ["usage: msprobe-megatron [-h] [--version] COMMAND ...", "", str(self.description)]
        for title, names in GROUPS.items():
            lines += ["", f"{title}:", *(f"  {name:12}{_module(name).HELP}" for name in names)]
        return "\n".join([*lines, "", _EPILOG, ""])


def _top_parser() -> _TopParser:
    parser = _TopParser(
        prog="msprobe-megatron",
        usage="msprobe-megatron [-h] [--version] COMMAND ...",
        description="Numerical probe for Megatron training jobs.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    return parser
