"""A value of the probe file together with the place it stands at.

The readers in ``validate`` receive a ``Node`` instead of a bare value, so that whichever of them refuses it
can name file and key path without being told. A ``Context`` also knows where a translated value came from: an
error about ``dump.level`` in a file of msprobe names msprobe's own ``level``.
"""

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from msprobe_megatron.config.errors import ConfigError, shown, shown_key


@dataclass(frozen=True)
class Context:
    """The file being read, and for a translated file the original key of each key of ours."""

    source: str
    origins: Mapping[str, str] = field(default_factory=dict)

    def original(self, path: str) -> str:
        """Return the key the user wrote for ``path``.

        Example: where ``dump.list`` comes from ``statistics.list``, so does ``dump.list[2]``.
        """
        stem = path
        while stem:
            if stem in self.origins:
                return self.origins[stem] + path[len(stem) :]
            stem = stem[: max(stem.rfind("."), stem.rfind("["), 0)]
        return path

    def error(self, path: str, problem: str, accepted: str = "") -> ConfigError:
        """Return the error for ``path``; the caller raises it.

        Example: ``raise context.error("steps", "'abc' is not a step", accepted="0, 5-7")``.
        """
        where = shown_key(self.original(path)) + ": " if path else ""
        source = self.source if self.source.isprintable() else shown(self.source)
        return ConfigError(f"{source}: {where}{problem}" + (f"; accepted: {accepted}" if accepted else ""))


@dataclass(frozen=True)
class Node:
    """One value of the file, with its key path (``""`` for the whole document).

    Example::

        node = Node({"level": "L0"}, "dump", Context("probe.yaml"))
        node.entries({"level", "task"})["level"].choice(("L0", "L1"))     # "L0"
    """

    value: object
    path: str
    context: Context

    def error(self, problem: str, accepted: str = "") -> ConfigError:
        """Return an error that shows this node's value in front of ``problem``."""
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
                # The matcher is quadratic in the length of the word.
                close = difflib.get_close_matches(key[:64], list(known), n=1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                raise self.context.error(child.path, f"unknown key{hint}", ", ".join(known))
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
        """Return one word of ``choices``."""
        # The type test comes first: True == 1 and lists are not hashable.
        if not isinstance(self.value, str) or self.value not in choices:
            raise self.error("is not known", ", ".join(choices))
        return self.value
