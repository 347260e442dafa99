"""The ``shards`` section: how tensors lie over the ranks, where the kit does not know it or the user knows better.

In the probe file, or in a file of its own for ``compare --specs FILE``. The first rule that fits a tensor counts. The
grammar of a spec is that of ``topology.shards``; here it is checked word by word, so that a wrong one is refused
before a job starts.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msprobe_megatron.config.document import read_document
from msprobe_megatron.config.names import parse_name_pattern
from msprobe_megatron.config.node import Context, Node

AXES = ("tp", "pp", "dp", "cp", "ep", "etp", "edp")
ORDERS = ("contiguous", "zigzag", "gated", "samples", "unordered")
KINDS = ("activation", "gradient", "parameter", "grad_reduced", "grad_clipped", "optimizer_state", "update", "data")
_IOS = ("input", "output", "weight")
_DIM = re.compile(r"[A-Za-z0-9_*]+(?:\[([^\]\[]+)\])?")
ACCEPTED = (
    "dimensions such as 's[cp:zigzag] b[dp:samples] h[tp]', then '; partial tp' if ranks hold summands;"
    " or '?reason' for what must not be merged"
)


@dataclass(frozen=True)
class ShardRule:
    """Which tensors, and how they are cut. Empty ``kind``, ``io`` and ``path`` are any.

    ``name`` is part of a canonical name, or a regular expression between slashes.
    """

    name: str
    shard: str
    kind: str = ""
    io: str = ""
    path: str | None = None


def parse_shards(node: Node) -> tuple[ShardRule, ...]:
    """Read a list of rules.

    Example: ``[{name: my_mixer, io: output, shard: "s b h[tp]"}]``.
    """
    return tuple(_rule(item) for item in node.items("a list of {name: …, shard: …}"))


def load_shards(path: str | os.PathLike[str]) -> tuple[ShardRule, ...]:
    """Read a file that holds nothing but ``shards``.

    Example: ``load_shards("specs.yaml")``.
    """
    node = Node(read_document(path), "", Context(os.fspath(path)))
    found = node.entries(("shards",))
    if "shards" not in found:
        raise node.context.error("", "has no rules", "shards: [{name: …, shard: …}]")
    return parse_shards(found["shards"])


def _rule(node: Node) -> ShardRule:
    fields = {key: SHARD[key](child) for key, child in node.entries(SHARD).items()}
    for key in ("name", "shard"):
        if key not in fields:
            raise node.error(f"has no {key}", "{name: part of a name, shard: spec}")
    return ShardRule(**fields)


def _spec(node: Node) -> str:
    text = node.text(ACCEPTED)
    if text.startswith("?"):
        if not text[1:].strip():
            raise node.error("gives no reason", ACCEPTED)
        return text
    head, *clauses = [part.strip() for part in text.split(";")]
    words = head.split()
    if not words:
        raise node.error("has no dimensions", ACCEPTED)
    for word in words:
        match = _DIM.fullmatch(word)
        if match is None:
            raise node.error(f"has a dimension {word!r} that cannot be read", ACCEPTED)
        _check_cuts(node, match[1])
    for clause in clauses:
        verb, *axes = clause.split() or [""]
        if verb != "partial" or not axes or not set(axes) <= set(AXES):
            raise node.error(f"ends in {clause!r}", f"; partial and one of {', '.join(AXES)}")
    return text


def _check_cuts(node: Node, cuts: str | None) -> None:
    for cut in cuts.split(",") if cuts else ():
        axis, colon, order = cut.partition(":")
        if axis not in AXES:
            raise node.error(f"names an axis {axis!r}", ", ".join(AXES))
        if colon and order not in ORDERS:
            raise node.error(f"names an order {order!r}", ", ".join(ORDERS))


def _any_text(node: Node) -> str:
    if not isinstance(node.value, str):
        raise node.error("is not text", "position inside nested arguments, '' for a bare tensor")
    return node.value


SHARD: Mapping[str, Callable[[Node], Any]] = {
    "name": parse_name_pattern,
    "shard": _spec,
    "kind": lambda node: node.choice(KINDS),
    "io": lambda node: node.choice(_IOS),
    "path": _any_text,
}
