"""The ``--msprobe-*`` flags: in Megatron's own parser, and in the kit's own reading of the command line.

There are two readers, because the kit must know whether it is armed long before the host parses its arguments, and
because some hosts do not pass unknown flags on. ``add_arguments`` makes the host accept the flags;
``from_command_line`` reads them for the kit. Nothing heavy is imported unless a probe file is loaded.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from msprobe_megatron.config.document import ConfigError, Context

if TYPE_CHECKING:
    from msprobe_megatron.config import ProbeConfig

DEVICES = ("auto", "cpu", "cuda", "npu")
# Flag -> its options for argparse. Every default is None, which means that the flag was not given.
FLAGS: dict[str, dict[str, Any]] = {
    "--msprobe-config": {"metavar": "FILE", "help": "probe file; arms the probe (default: $MSPROBE_CONFIG)"},
    "--msprobe-output": {"metavar": "DIR", "help": "run directory, over the file's output ($MSPROBE_OUTPUT)"},
    "--msprobe-device": {"choices": DEVICES, "help": "backend that computes the statistics (default: auto)"},
    "--msprobe-steps": {
        "metavar": "LIST",
        "help": "steps to record, over the file's, e.g. 0,5-7,100-1000/100",
    },
    "--msprobe-strict": {"action": "store_true", "help": "stop the job on an internal error of the probe"},
}
ENVIRONMENT = {"config": "MSPROBE_CONFIG", "output": "MSPROBE_OUTPUT"}


@dataclass(frozen=True)
class Flags:
    """The flags of a command line; None for one that was not given."""

    config: str | None = None
    output: str | None = None
    device: str = "auto"
    steps: str | None = None
    strict: bool | None = None

    @property
    def armed(self) -> bool:
        """Whether a probe file was given."""
        return self.config is not None

    def load_config(self) -> "ProbeConfig":
        """Load the probe file, with the overrides of the other flags."""
        from msprobe_megatron.config import Overrides, load

        if self.config is None:
            raise _error("--msprobe-config", "no probe file is named", "--msprobe-config FILE or $MSPROBE_CONFIG")
        return load(self.config, Overrides(self.output, self.steps, self.strict))


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to a parser and return it; idempotent."""
    group = parser.add_argument_group("msprobe")
    for flag, options in FLAGS.items():
        try:
            group.add_argument(flag, default=None, **options)
        except argparse.ArgumentError:
            # Already added: some hosts build their parser in several places, each of which is patched.
            continue
    return parser


def from_command_line(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Flags:
    """Read the flags from a command line that also holds flags of other programs.

    ``argv`` is without the program name, as for argparse. The last of repeated flags wins. An unknown ``--msprobe-…``
    is an error, because it would be ignored silently otherwise.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    words = sys.argv[1:] if argv is None else list(argv)
    if "--" in words:
        # Nothing after it is a flag.
        words = words[: words.index("--")]
    namespace, others = add_arguments(parser).parse_known_args(words)
    for other in others:
        if other.startswith("--msprobe-"):
            raise _error(other.partition("=")[0], "unknown flag", ", ".join(FLAGS))
    return from_namespace(namespace, environ)


def from_namespace(namespace: object, environ: Mapping[str, str] | None = None) -> Flags:
    """Read the flags from parsed arguments; a missing attribute is a flag that was not given."""
    environ = os.environ if environ is None else environ
    given: dict[str, Any] = {}
    for entry in fields(Flags):
        value = getattr(namespace, f"msprobe_{entry.name}", None)
        if value == "":
            # Probably an unset shell variable; it must not disarm the probe silently.
            raise _error(f"--msprobe-{entry.name}", "'' is empty", "a value, or leave the flag out")
        if value is None:
            value = environ.get(ENVIRONMENT.get(entry.name, "")) or None
        if value is not None:
            given[entry.name] = value
    return Flags(**given)


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting: the process is the host's."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}")


def _error(flag: str, problem: str, accepted: str) -> ConfigError:
    return Context("command line").error(flag, problem, accepted)
