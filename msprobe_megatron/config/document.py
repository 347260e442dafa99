"""A document: YAML or JSON text read strictly into plain values, and the nodes that readers walk it by.

The first stage of the data path: bytes in, plain dicts, lists, numbers and text out, nothing yet known about keys.
Accepted is the part of YAML 1.2 that a settings file needs: no tags, anchors or aliases, no duplicate keys, ``true``
and ``false`` as the only booleans (so ``on:`` stays a key and ``no`` stays text), one document of bounded size and
depth.

Readers of sections receive a ``Node`` instead of a bare value, so that every refusal names file and key path. A
``Context`` also maps translated keys back: an error about ``dump.level`` in a file of msprobe names msprobe's
``level``.

A ``ConfigError`` is one line that names the file, the key, the value and what is accepted, so that a launcher of a
thousand ranks prints something readable.
"""

import difflib
import json
import math
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml


_PLAIN_KEY = re.compile(r"[\w.\[\]/-]+")
_SHOWN_CHARACTERS = 60


class ConfigError(Exception):
    """A fault in a probe file or a flag; ``str(error)`` is the one line that the user sees."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.splitlines()))


def shown(value: object) -> str:
    """``value`` as it appears in a message: its repr, shortened in the middle if long."""
    # In YAML's spelling, because that is what the user wrote.
    text = ("null" if value is None else str(value).lower()) if isinstance(value, bool | None) else repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:40]}…{text[-16:]}"


def did_you_mean(word: str, known: Collection[str]) -> str:
    """`` (did you mean WORD?)`` for the closest of the known words, whatever its case; empty if none is close.

    Example::

        >>> did_you_mean("l0", ("L0", "L1", "mix"))
        ' (did you mean L0?)'
    """
    by_lower = {name.lower(): name for name in known}
    # The matcher is quadratic in the length of the word.
    close = difflib.get_close_matches(word[:64].lower(), list(by_lower), n=1)
    return f" (did you mean {by_lower[close[0]]}?)" if close else ""


def shown_key(key: str) -> str:
    """A key path as it appears in a message; one with spaces or control characters is quoted."""
    return key if _PLAIN_KEY.fullmatch(key) and len(key) <= 200 else shown(key)


MAX_BYTES = 1 << 20
MAX_DEPTH = 32
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]{1,40}|[0-9]{1,40}(?:\.[0-9]{0,40}|(?=[eE])))(?:[eE][-+]?[0-9]{1,4})?")
_NARROW = {"，": ",", "：": ":", "｛": "{", "｝": "}"}
_WIDE = re.compile(r'"(?:[^"\\\n]|\\.)*"|[，：｛｝]')
_WORDS = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "false": False,
    ".nan": float("nan"),
    ".inf": float("inf"),
    "-.inf": float("-inf"),
}


@dataclass(frozen=True)
class Context:
    """The file being read, and for a translated file the original key of each translated key."""

    source: str
    origins: Mapping[str, str] = field(default_factory=dict)

    def original(self, path: str) -> str:
        """The key that the user wrote for ``path``."""
        stem = path
        while stem:
            if stem in self.origins:
                return self.origins[stem] + path[len(stem) :]
            stem = stem[: max(stem.rfind("."), stem.rfind("["), 0)]
        return path

    def error(self, path: str, problem: str, accepted: str = "") -> ConfigError:
        """An error about ``path``, for the caller to raise."""
        where = shown_key(self.original(path)) + ": " if path else ""
        source = self.source if self.source.isprintable() else shown(self.source)
        return ConfigError(f"{source}: {where}{problem}" + (f"; accepted: {accepted}" if accepted else ""))


@dataclass(frozen=True)
class Node:
    """One value of the file, with its key path (``""`` for the whole document).

    Example::

        >>> node = Node({"level": "L0"}, "dump", Context("probe.yaml"))
        >>> node.entries({"level", "task"})["level"].choice(("L0", "L1"))
        'L0'
    """

    value: object
    path: str
    context: Context

    def error(self, problem: str, accepted: str = "") -> ConfigError:
        """An error that shows the value of this node in front of ``problem``."""
        return self.context.error(self.path, f"{shown(self.value)} {problem}", accepted)

    def mapping(self, accepted: str = "a mapping") -> dict[str, "Node"]:
        """Return the children of a mapping by key."""
        if not isinstance(self.value, Mapping):
            raise self.error("is not a mapping", accepted)
        children = {}
        for key, value in self.value.items():
            if not isinstance(key, str):
                raise self.context.error(self.path, f"key {shown(key)} is not text", accepted)
            children[key] = Node(value, f"{self.path}.{key}" if self.path else key, self.context)
        return children

    def entries(self, known: Collection[str]) -> dict[str, "Node"]:
        """Return the children of a mapping, all of whose keys must be ``known``."""
        children = self.mapping(f"a mapping with keys of {', '.join(known)}")
        for key, child in children.items():
            if key not in known:
                raise self.context.error(child.path, f"unknown key{did_you_mean(key, known)}", ", ".join(known))
        return children

    def items(self, accepted: str = "a list") -> list["Node"]:
        """Return the elements of a list."""
        if not isinstance(self.value, list | tuple):
            raise self.error("is not a list", accepted)
        return [Node(item, f"{self.path}[{i}]", self.context) for i, item in enumerate(self.value)]

    def boolean(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise self.error("is not a boolean", "true, false")
        return self.value

    def integer(self, low: int, high: int) -> int:
        """Return a whole number between ``low`` and ``high``; true and false are not numbers."""
        accepted = f"a whole number from {low} to {high}"
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.error("is not a whole number", accepted)
        if not low <= self.value <= high:
            raise self.error("is out of range", accepted)
        return self.value

    def positive_number(self) -> float:
        """Return a finite number above zero."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.error("is not a number", "a finite number above 0")
        if not (self.value > 0 and math.isfinite(self.value)):
            raise self.error("is out of range", "a finite number above 0")
        return float(self.value)

    def text(self, accepted: str = "text that is not empty") -> str:
        """Return text that is not empty."""
        if not isinstance(self.value, str):
            raise self.error("is not text", accepted)
        if not self.value.strip():
            raise self.error("is empty", accepted)
        return self.value

    def choice(self, choices: Sequence[str]) -> str:
        """Return one of ``choices``."""
        # The type test comes first: True == 1 and lists are not hashable.
        if not isinstance(self.value, str) or self.value not in choices:
            hint = did_you_mean(self.value, choices) if isinstance(self.value, str) else ""
            raise self.error(f"is not known{hint}", ", ".join(choices))
        return self.value


def read_document(path: str | os.PathLike[str]) -> Any:
    """The content of a file as plain values; raises ``ConfigError``."""
    source = os.fspath(path)
    return parse_document_text(_read_text(source), source)


def parse_document_text(text: str, source: str) -> Any:
    """YAML or JSON ``text`` as plain values; ``source`` names it in errors."""
    if text.lstrip().startswith("{"):
        # JSON is YAML except for a few corners (tabs, surrogate pairs), so JSON's own reader goes first.
        # Text copied from a Chinese document often has full-width punctuation, which means nothing else in JSON.
        for candidate in dict.fromkeys((text, _ascii_punctuation(text))):
            try:
                return _from_json(candidate, Context(source))
            except (ValueError, RecursionError):
                continue
    return _from_yaml(text, Context(source))


def _ascii_punctuation(text: str) -> str:
    """The text with ASCII punctuation for full-width punctuation outside of strings."""
    return _WIDE.sub(lambda found: _NARROW.get(found[0], found[0]), text)


def _read_text(source: str) -> str:
    context = Context(source)
    try:
        # Opening a pipe would block the job forever, so the type of the file is checked first.
        if not stat.S_ISREG(os.stat(source).st_mode):
            raise context.error("", "is not a regular file", "a YAML or JSON file")
        with open(source, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise context.error("", f"cannot be read ({error.strerror})", "a readable YAML or JSON file") from None
    except ValueError:
        raise context.error("", "is not a file name", "a readable YAML or JSON file") from None
    if len(content) > MAX_BYTES:
        raise context.error("", "is too large for a probe file", f"at most {MAX_BYTES} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise context.error("", f"byte {error.start} is not UTF-8", "text in UTF-8") from None


class _Pairs(list[tuple[str, Any]]):
    """A JSON object before its keys are checked for duplicates."""


def _from_json(text: str, context: Context) -> Any:
    document = json.loads(text, object_pairs_hook=_Pairs, parse_int=_scalar, parse_constant=str)
    return _unique(document, "", MAX_DEPTH, context)


def _unique(value: Any, path: str, depth: int, context: Context) -> Any:
    if not isinstance(value, list):
        return value
    if depth == 0:
        raise context.error(path, "is nested too deeply", f"at most {MAX_DEPTH} levels")
    if not isinstance(value, _Pairs):
        return [_unique(item, f"{path}[{i}]", depth - 1, context) for i, item in enumerate(value)]
    table: dict[str, Any] = {}
    for key, item in value:
        child = f"{path}.{key}" if path else key
        if key in table:
            raise context.error(child, "is written twice", "each key once")
        table[key] = _unique(item, child, depth - 1, context)
    return table


def _from_yaml(text: str, context: Context) -> Any:
    import yaml

    class Composer(yaml.SafeLoader):
        """Builds the node tree only, and refuses anything that could construct objects or cycles."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            line = f"line {event.start_mark.line + 1}"
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise context.error("", f"{line}: has an anchor or alias", "values written out")
            if getattr(event, "tag", None):
                raise context.error("", f"{line}: has the tag {shown(event.tag)}", "plain values, no tags")
            if self.depth == MAX_DEPTH:
                raise context.error("", f"{line}: is nested too deeply", f"at most {MAX_DEPTH} levels")
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        root = Composer(text).get_single_node()
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # Converting an escape such as \UFFFFFFFF raises the error of the conversion, not a YAMLError.
        raise _syntax_error(error, text, context) from None
    return None if root is None else _plain(root, "", context)


def _syntax_error(error: Exception, text: str, context: Context) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be understood"
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    # Text copied from a Chinese document often has full-width punctuation.
    wide = next((sign for sign in "，：“”｛｝" if sign in text), "")
    hint = f" (the file holds a full-width {wide}, write the ASCII sign)" if wide else ""
    return context.error("", f"{where}{problem}{hint}", "YAML or JSON")


def _plain(node: "yaml.Node", path: str, context: Context) -> Any:
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style else _scalar(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, f"{path}[{i}]", context) for i, item in enumerate(node.value)]
    table: dict[str, Any] = {}
    for key, value in node.value:
        line = f"line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise context.error(path, f"{line}: a key is not plain text", "keys that are words")
        if key.value == "<<" and not key.style:
            raise context.error(path, f"{line}: the merge key << is not accepted", "values written out")
        child = f"{path}.{key.value}" if path else key.value
        if key.value in table:
            raise context.error(child, f"is written twice (again in {line})", "each key once")
        table[key.value] = _plain(value, child, context)
    return table


def _scalar(text: str) -> Any:
    """The value of an unquoted word; a number too long to be meant as one stays text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
