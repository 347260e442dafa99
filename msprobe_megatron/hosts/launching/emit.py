"""Writes out a recipe's copy with the kit in it: for those who want to read what will run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from msprobe_megatron.config.document import ConfigError
from msprobe_megatron.hosts.launching.command_line import RUN

# A command over continuation lines that calls a launcher and names a script.
_LAUNCHER = re.compile(r"(?:^|\s)(?:torchrun|python3?\s+-m\s+torch\.distributed\.(?:launch|run))\s")
_SCRIPT = re.compile(r"(?<=\s)(\"?\$\{?\w*SCRIPT\w*\}?\"?|[^\s$\"']*\.py)(?=\s|$)")
# What is passed over as a whole, or ends the arguments: a pipe, a redirection, a background job, a next command.
_PIECES = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?P<end>(?<=\s)\d>|[|>&;])""", re.DOTALL)


def emit(recipe: str, appended: Sequence[str], source: str) -> str:
    """The text of a recipe that runs its script under the kit, with `appended` at the end of the script's arguments."""
    done, count = [], 0
    for command in _commands(recipe):
        changed = _rewrite(command, appended)
        count += changed != command
        done.append(changed)
    if not count:
        raise ConfigError(
            f"{source}: no line calls torchrun or torch.distributed.launch with a script;"
            " accepted: a recipe that does, or one that is run without --emit"
        )
    return "".join(done)


def _commands(text: str) -> list[str]:
    """Lines, those that end in a backslash joined with their next."""
    found: list[str] = []
    joined = False
    for line in text.splitlines(keepends=True):
        if joined:
            found[-1] += line
        else:
            found.append(line)
        joined = line.rstrip("\r\n").endswith("\\") and not line.lstrip().startswith("#")
    return found


def _rewrite(command: str, appended: Sequence[str]) -> str:
    launcher = _LAUNCHER.search(command)
    if launcher is None or command.lstrip().startswith("#"):
        return command
    script = _SCRIPT.search(command, launcher.end() - 1)
    if script is None:
        return command
    head, tail = command[: script.start()], command[script.end() :]
    end = next((piece.start("end") for piece in _PIECES.finditer(tail) if piece["end"]), None)
    at = end if end is not None else len(tail)
    # A line for each flag, in the recipes' own manner.
    flags = "".join((" \\\n    " if word.startswith("--") else " ") + shlex.quote(word) for word in appended)
    arguments = tail[:at].rstrip().rstrip("\\").rstrip()
    rest = f" \\\n    {tail[end:]}" if end is not None else "\n"
    return f"{head}-m {RUN} {script.group()}{arguments}{flags}{rest}"
