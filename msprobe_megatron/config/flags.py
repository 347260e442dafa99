"""The ``--msprobe-*`` flags: in Megatron's own parser, and in the kit's own copy read from the command line.

Two readers, because the kit must know whether it is armed long before the host parses its arguments, and some
hosts never pass unknown flags on. ``add_arguments`` makes the host accept the flags; ``from_command_line``
reads them for the kit. Nothing heavy is imported before a probe file is asked for.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from msprobe_megatron.config.errors import ConfigError
from msprobe_megatron.config.node import Context

if TYPE_CHECKING:
    from msprobe_megatron.config import ProbeConfig

DEVICES = ("auto", "cpu", "cuda", "npu")
# Flag -> what argparse is told about it. Every default is None: a flag that was given can be told apart.
FLAGS: dict[str, dict[str, Any]] = {
    "--msprobe-config": {"metavar": "FILE", "help": "probe file; arms the probe (default: $MSPROBE_CONFIG)"},
    "--msprobe-output": {"metavar": "DIR", "help": "run directory, over the file's output ($MSPROBE_OUTPUT)"},
    "--msprobe-device": {"choices": DEVICES, "help": "backend the measures run on (default: auto)"},
    "--msprobe-steps": {
        "metavar": "LIST",
        "help": "steps to record, over the file's, e.g. 0,5-7,100-1000/100",
    },
    "--msprobe-strict": {"action": "store_true", "help": "a fault of the probe stops the job"},
}
ENVIRONMENT = {"config": "MSPROBE_CONFIG", "output": "MSPROBE_OUTPUT"}


@dataclass(frozen=True)
class Flags:
    """What was said on the command line; None where nothing was.

    Example::

        flags = from_command_line()
        if flags.armed:
            config = flags.load_config()
    """

    config: str | None = None
    output: str | None = None
    device: str = "auto"
    steps: str | None = None
    strict: bool | None = None

    @property
    def armed(self) -> bool:
        """Whether a probe file was named at all."""
        return self.config is not None

    def load_config(self, allow_unavailable: bool = False) -> "ProbeConfig":
        """Read the probe file these flags name, with what the other flags override."""
        from msprobe_megatron.config import Overrides, load

        if self.config is None:
            raise _wrong("--msprobe-config", "no probe file is named", "--msprobe-config FILE or $MSPROBE_CONFIG")
        return load(self.config, Overrides(self.output, self.steps, self.strict), allow_unavailable)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to a parser, once however often it is called, and return the parser.

    Example: ``args = add_arguments(argparse.ArgumentParser()).parse_args()``.
    """
    group = parser.add_argument_group("msprobe")
    for flag, options in FLAGS.items():
        try:
            group.add_argument(flag, default=None, **options)
        except argparse.ArgumentError:
            # Already there: several hosts build their parser in several places, and each of them is patched.
            continue
    return parser


def from_command_line(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Flags:
    """Read the flags out of a command line that is full of other programs' flags.

    ``argv`` is without the program's name, as for argparse. A flag given twice counts as given last; an
    unknown ``--msprobe-…`` is an error, because it would otherwise do nothing.

    Example: ``from_command_line(["--lr", "1e-4", "--msprobe-config=probe.yaml"]).config == "probe.yaml"``.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    words = sys.argv[1:] if argv is None else list(argv)
    if "--" in words:
        # What follows is not flags, for any program.
        words = words[: words.index("--")]
    namespace, others = add_arguments(parser).parse_known_args(words)
    for other in others:
        if other.startswith("--msprobe-"):
            raise _wrong(other.partition("=")[0], "unknown flag", ", ".join(FLAGS))
    return from_namespace(namespace, environ)


def from_namespace(namespace: object, environ: Mapping[str, str] | None = None) -> Flags:
    """Take the flags out of parsed arguments; attributes that are missing were not given.

    Example: ``from_namespace(megatron.training.get_args())``.
    """
    environ = os.environ if environ is None else environ
    given: dict[str, Any] = {}
    for entry in fields(Flags):
        value = getattr(namespace, f"msprobe_{entry.name}", None)
        if value == "":
            # An unset shell variable; to take it as "not armed" would be silent.
            raise _wrong(f"--msprobe-{entry.name}", "'' is empty", "a value, or leave the flag out")
        if value is None:
            value = environ.get(ENVIRONMENT.get(entry.name, "")) or None
        if value is not None:
            given[entry.name] = value
    return Flags(**given)


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending a process that is not ours to end."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}")


def _wrong(flag: str, problem: str, accepted: str) -> ConfigError:
    return Context("command line").error(flag, problem, accepted)
