"""The machinery of translating another tool's settings: a draft of our document, and the kinds of table
entries.

A table maps each key of the other tool to one entry: ``To`` (the same value under a key of ours), ``Via`` (a
function decides), ``Always`` (the kit does it in any case, a note says so) or ``Refuse`` (a sentence says
what to write instead). There is no fifth case, so no key is dropped in silence. ``validate`` checks the
drafted document afterwards and names the original keys, which the draft remembers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msprobe_megatron.config.errors import shown
from msprobe_megatron.config.node import Node


@dataclass
class Draft:
    """Our document while it is being written.

    Example: ``draft.put("dump.level", "L0", origin="level")``.
    """

    document: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, path: str, value: object, origin: str) -> None:
        """Set a key of ours, such as ``dump.level``, and remember the key it comes from."""
        *sections, key = path.split(".")
        table = self.document
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = value
        self.origins[path] = origin

    def note(self, origin: str, sentence: str) -> None:
        """Remember something the user should know about the translation."""
        self.notes.append(f"{origin}: {sentence}")


@dataclass(frozen=True)
class To:
    """The same value, under a key of ours."""

    target: str

    def apply(self, draft: Draft, node: Node) -> None:
        """Copy the value; ``validate`` will check it."""
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
    """A setting that changes nothing here, because the kit always does as ``sentence`` says."""

    sentence: str
    check: Callable[[Node], object]

    def apply(self, draft: Draft, node: Node) -> None:
        """Check the type and leave a note."""
        self.check(node)
        draft.note(node.path, self.sentence)


@dataclass(frozen=True)
class Refuse:
    """A setting the kit does not have; ``unless`` holds the values that ask for nothing."""

    sentence: str
    unless: tuple[object, ...] = ()

    def apply(self, draft: Draft, node: Node) -> None:
        """Raise unless the value asks for nothing."""
        # Compared with their types, because False == 0 and True == 1.
        if not any(type(node.value) is type(value) and node.value == value for value in self.unless):
            raise refusal(node, self.sentence)
        draft.note(node.path, f"{shown(node.value)} asks for nothing")


Entry = To | Via | Always | Refuse
Table = Mapping[str, Entry]


def refusal(node: Node, sentence: str) -> Exception:
    """Return the error for a key that cannot be taken over; ``sentence`` says why and what to write instead.

    Example: ``raise refusal(node, "there is no L2 here; write L0")``.
    """
    return node.error(f"cannot be translated: {sentence}")


def apply_table(draft: Draft, node: Node, table: Table, skip: tuple[str, ...] = ()) -> None:
    """Translate every key of a mapping; null is a key left out, as in msprobe.

    Example: ``apply_table(draft, root, COMMON, skip=("statistics",))``.
    """
    for key, child in node.entries(dict.fromkeys((*table, *skip))).items():
        if key not in skip and child.value is not None:
            table[key].apply(draft, child)
