"""Settings out of a launch script, without running it: flags, and the variables that it exports.

Understands what launch scripts of training are made of: assignments, arrays, quoted strings of flags, continued lines,
`$NAME` and `${NAME:-otherwise}`. What depends on the machine (`$1`, `$(hostname)`) stays as it is written.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_megatron.analysis.load.run import RunError

_LARGEST = 1 << 20
_ASSIGNMENT = re.compile(r"^(export\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_FLAG = re.compile(r"^--([A-Za-z][\w-]*)(?:=(.*))?$", re.DOTALL)
_COMMENT = re.compile(r"(^|\s)#[^\"']*$")
_ENDS = ("|", ">", ">>", "2>&1", "&", "<")
_DEPTH = 8


@dataclass
class Script:
    """What a launch script sets."""

    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def read_script(path: Path) -> Script:
    """Read a script; raises `RunError` if it is not text."""
    try:
        if path.stat().st_size > _LARGEST:
            raise RunError(f"{path}: {path.stat().st_size} bytes; accepted: a launch script of at most {_LARGEST}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error
    found = Script()
    known: dict[str, str] = {}
    commands: list[str] = []
    for line in _lines(text):
        match = _ASSIGNMENT.match(line)
        if match is None:
            commands.append(line)
            continue
        value = _value(match[4])
        before = known.get(match[2], "") + " " if match[3] else ""
        known[match[2]] = before + _filled(value, known)
        if match[1]:
            found.environment[match[2]] = known[match[2]]
    for line in commands:
        _flags(found.arguments, _words(_filled(line, known)))
    return found


def _lines(text: str) -> list[str]:
    """Commands: comments dropped, continued lines, quoted text and arrays over several lines joined."""
    lines, open_line = [], ""
    for commented in text.replace("\\\n", " ").splitlines():
        raw = _COMMENT.sub("", commented)
        line = raw.strip() if not open_line else f"{open_line} {raw.strip()}"
        if line.startswith("#") or not line:
            continue
        if _is_open(line):
            open_line = line
            continue
        open_line = ""
        lines += [part.strip() for part in re.split(r"\s*(?:;|&&)\s+", line) if part.strip()]
    return lines + ([open_line] if open_line else [])


def _is_open(line: str) -> bool:
    quotes = re.sub(r"\\.", "", line)
    array = re.match(r"^(export\s+)?\w+\+?=\(", line) is not None
    return quotes.count('"') % 2 == 1 or (array and not re.search(r"\)\s*(#.*)?$", line))


def _value(text: str) -> str:
    text = text.strip()
    if text.startswith("("):
        return text[1:].rpartition(")")[0]
    try:
        return shlex.split(text, comments=True)[0] if text else ""
    except (ValueError, IndexError):
        return text


def _filled(text: str, known: dict[str, str]) -> str:
    for _ in range(_DEPTH):
        new = _VARIABLE.sub(lambda m: known.get(m[1] or m[3], m[2] if m[2] is not None else m[0]), text)
        if new == text:
            break
        text = new
    return text


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.split()
    # A quoted "${ARGS}" is one word that holds many.
    return [part for word in words for part in (word.split() if " --" in f" {word}" else [word])]


def _flags(found: dict[str, Any], words: list[str]) -> None:
    name = ""
    values: list[str] = []

    def put() -> None:
        if name:
            found[name.replace("-", "_")] = True if not values else values[0] if len(values) == 1 else list(values)

    for word in words:
        if word in _ENDS:
            break
        match = _FLAG.match(word)
        if match is None:
            values.append(word)
            continue
        put()
        name, values = match[1], [match[2]] if match[2] is not None else []
    put()
