"""Translation of another tool's settings: the draft of a probe file, and the entries of a translation table.

A table maps each key of the other tool to one entry: ``To`` (the same value under a key of the probe file), ``Via`` (a
function), ``Always`` (the kit does so in any case, as a note says) or ``Refuse`` (the message says what to write
instead). There is no other entry, so no key is dropped silently. The draft is validated afterwards like any probe
file; errors name the original keys, which the draft records.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msprobe_megatron.config.document import Node, shown


@dataclass
class Draft:
    """The probe file being written."""

    document: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, path: str, value: object, origin: str) -> None:
        """Set a key of the probe file, such as ``dump.level``, and record the key it comes from."""
        *sections, key = path.split(".")
        table = self.document
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = value
        self.origins[path] = origin

    def note(self, origin: str, sentence: str) -> None:
        """Record a note about the translation for the user."""
        self.notes.append(f"{origin}: {sentence}")


@dataclass(frozen=True)
class To:
    """The same value, under a key of the probe file."""

    target: str

    def apply(self, draft: Draft, node: Node) -> None:
        """Copy the value; it is validated with the draft."""
        draft.put(self.target, node.value, node.path)


@dataclass(frozen=True)
class Via:
    """A function that reads the value and writes into the draft."""

    function: Callable[[Draft, Node], None]

    def apply(self, draft: Draft, node: Node) -> None:
        """Call the function."""
        self.function(draft, node)


@dataclass(frozen=True)
class Always:
    """A setting without effect, because the kit always does what ``sentence`` says."""

    sentence: str
    check: Callable[[Node], object]

    def apply(self, draft: Draft, node: Node) -> None:
        """Check the type and leave a note."""
        self.check(node)
        draft.note(node.path, self.sentence)


@dataclass(frozen=True)
class Refuse:
    """A setting that the kit does not have; ``unless`` holds the values without effect."""

    sentence: str
    unless: tuple[object, ...] = ()

    def apply(self, draft: Draft, node: Node) -> None:
        """Raise unless the value has no effect."""
        # Types are compared as well, because False == 0 and True == 1.
        if not any(type(node.value) is type(value) and node.value == value for value in self.unless):
            raise refusal(node, self.sentence)
        draft.note(node.path, f"{shown(node.value)} has no effect")


Entry = To | Via | Always | Refuse
Table = Mapping[str, Entry]


def refusal(node: Node, sentence: str) -> Exception:
    """The error for a key that cannot be translated; ``sentence`` says why, and what to write instead."""
    return node.error(f"cannot be translated: {sentence}")


def apply_table(draft: Draft, node: Node, table: Table, skip: tuple[str, ...] = ()) -> None:
    """Translate every key of a mapping; a null is a key left out, as in msprobe."""
    for key, child in node.entries(dict.fromkeys((*table, *skip))).items():
        if key not in skip and child.value is not None:
            table[key].apply(draft, child)
