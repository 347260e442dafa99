"""The reference of the probe file, written from the schema and its readers, so that it cannot fall behind them.

What a key accepts is asked of the reader itself: it is given something that is no value at all, and the error says what
would have been one. Printed by ``msprobe-megatron validate --reference``; ``docs/probe_file.md`` is that output.
"""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

from msprobe_megatron.config import schema
from msprobe_megatron.config.errors import ConfigError
from msprobe_megatron.config.meanings import MEANINGS
from msprobe_megatron.config.node import Context, Node
from msprobe_megatron.config.selection import RankSelection, StepSelection
from msprobe_megatron.config.sizes import format_size
from msprobe_megatron.config.validate import TABLES, Reader

_HEAD = """# The probe file

YAML or JSON; a `config.json` of msprobe is recognised and translated. Unknown keys, values out of range and patterns
that do not compile are refused before training, with file, key, value and what is accepted. Written by
`msprobe-megatron validate --reference`.
"""
# Where the sections stand that are no section of the file itself.
_PLACES = {
    "ProbeConfig": "The top",
    "Alert": "`monitor.alerts[…]`",
    "AlertAction": "`monitor.alerts[…].action`",
    "ShardRule": "`shards[…]`",
}
_IN_BYTES = {"host_memory", "disk"}


class _NoValue:
    """What no key of a probe file accepts."""

    def __repr__(self) -> str:
        return "?"


def reference() -> str:
    """The whole reference in Markdown.

    Example: ``print(reference())``.
    """
    parts = [_HEAD]
    for section, readers in TABLES.items():
        parts += [f"## {_heading(section)}", _meaning(section), _table(section, readers)]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _heading(section: type) -> str:
    if section.__name__ in _PLACES:
        return _PLACES[section.__name__]
    found = re.search(r"``(\w+)`` section", inspect.getdoc(section) or "")
    return f"`{found[1]}`" if found else f"`{section.__name__}`"


def _meaning(section: type) -> str:
    if section is schema.ProbeConfig:
        return ""
    text = (inspect.getdoc(section) or "").replace("``", "`")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _table(section: type, readers: Any) -> str:
    lines = ["| key | default | accepted | meaning | example |", "|---|---|---|---|---|"]
    fields = {field.name: field for field in dataclasses.fields(section)}
    for key, reader in readers.items():
        default = _default(fields[key], key) if key in fields else ""
        meaning, example = MEANINGS[section.__name__][key]
        accepted = _cell(_accepted(key, reader))
        lines.append(f"| `{key}` | {default} | {accepted} | {_cell(meaning)} | `{_cell(f'{key}: {example}')}` |")
    return "\n".join(lines)


def _default(field: "dataclasses.Field[Any]", key: str) -> str:
    value: Any = field.default
    if value is dataclasses.MISSING:
        make: Any = field.default_factory
        if make is dataclasses.MISSING:
            return "(needed)"
        value = make()
    return _cell(f"`{_written(value, key)}`") if value not in (None, "") else ""


def _written(value: Any, key: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, RankSelection | StepSelection):
        return value.describe()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if dataclasses.is_dataclass(value):
        return "see below"
    if key in _IN_BYTES:
        return format_size(value).replace(" ", "")
    return f"./{value}" if isinstance(value, Path) else str(value)


def _accepted(key: str, reader: Reader) -> str:
    try:
        reader(Node(_NoValue(), key, Context("probe.yaml")))
    except ConfigError as error:
        return str(error).partition("; accepted: ")[2] or str(error)
    return "anything"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
