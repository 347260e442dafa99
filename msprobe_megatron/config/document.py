"""Reading a probe file into plain dicts, lists, numbers and text, more strictly than YAML itself.

The first stage of the data path: bytes in, document out, nothing yet known about keys. It accepts the part of
YAML 1.2 that a settings file needs: no tags, anchors or aliases, no key written twice, ``true`` and ``false``
as the only booleans (so that ``on:`` stays a key and ``no`` stays a word), one document of bounded size and
depth.
"""

import json
import os
import re
import stat
from typing import TYPE_CHECKING, Any

from msprobe_megatron.config.errors import ConfigError, shown
from msprobe_megatron.config.node import Context

if TYPE_CHECKING:
    import yaml

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


def read_document(path: str | os.PathLike[str]) -> Any:
    """Return what the file holds.

    Example: a file with ``steps: [1, 2-3]`` gives ``{"steps": [1, "2-3"]}``.
    """
    source = os.fspath(path)
    return parse_document_text(_read_text(source), source)


def parse_document_text(text: str, source: str) -> Any:
    """Return what YAML or JSON ``text`` holds; ``source`` names it in errors.

    Example: ``parse_document_text("strict: true", "probe.yaml") == {"strict": True}``.
    """
    if text.lstrip().startswith("{"):
        # JSON is YAML except for a few corners (tabs, surrogate pairs), so JSON's own reader goes first.
        # Files copied out of a document in Chinese carry its punctuation along, which JSON has no other use for.
        for candidate in dict.fromkeys((text, _ascii_punctuation(text))):
            try:
                return _from_json(candidate, Context(source))
            except (ValueError, RecursionError):
                continue
    return _from_yaml(text, Context(source))


def _ascii_punctuation(text: str) -> str:
    """The text with ASCII signs for full-width ones outside of strings."""
    return _WIDE.sub(lambda found: _NARROW.get(found[0], found[0]), text)


def _read_text(source: str) -> str:
    context = Context(source)
    try:
        # A pipe would block the job for ever, so the kind of file is looked at before it is opened.
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
    """A JSON object before its keys are known to be different."""


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
        """Builds the node tree only; what could construct objects or loops is refused on the way."""

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
        # The scanner converts escapes such as \UFFFFFFFF and lets the conversion's own error through.
        raise _syntax_error(error, text, context) from None
    return None if root is None else _plain(root, "", context)


def _syntax_error(error: Exception, text: str, context: Context) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be understood"
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    # Text pasted from a document in Chinese often carries its punctuation along.
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
    """Return what an unquoted word stands for; a number too long to be meant as one stays text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
