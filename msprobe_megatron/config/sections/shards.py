"""The ``shards`` section: how tensors are sharded over the ranks, where the kit does not know or the user knows better.

In the probe file, or in a file of its own for ``compare --specs FILE``. The first rule that matches a tensor applies.
The grammar of a spec is that of ``topology.shards``; it is checked here, so that a wrong one is refused before a job
starts.
"""

import os
import re
from dataclasses import dataclass

from msprobe_megatron.config.document import Context, Node, read_document
from msprobe_megatron.config.keys import ValueType, key, list_of, one_of, required_key, section
from msprobe_megatron.config.name_patterns import NAME_PATTERN
from msprobe_megatron.config.selection import AXES

ORDERS = ("contiguous", "zigzag", "gated", "samples", "unordered")
_SIZES = re.compile(r"[1-9]\d*( ?, ?[1-9]\d*)*")
NUMBERED = {"packed": _SIZES, "zigzag": _SIZES, "groups": re.compile(r"[1-9]\d*")}
"""Orders that are followed by numbers: the sizes of tensors packed into one, the number of groups that ranks share."""
KINDS = (
    *("activation", "gradient", "parameter", "buffer", "grad_reduced", "grad_clipped", "optimizer_state"),
    *("update", "data"),
)
ACCEPTED = (
    "dimensions such as 's[cp:zigzag] b[dp:samples] h[tp]' or 'd0[tp:packed 128,128,16] d1',"
    " then '; partial tp' if ranks hold summands;"
    " or '?reason' for what must not be merged"
)
_DIM = re.compile(r"[A-Za-z0-9_*]+(?:\[([^\]\[]+)\])?")
_WORD = re.compile(r"[^\s\[]+\[[^\]]*\]\S*|\S+")
_CUT_END = re.compile(r",(?=\s*[A-Za-z])")


def _read_spec(node: Node) -> str:
    text = node.text(ACCEPTED)
    if text.startswith("?"):
        if not text[1:].strip():
            raise node.error("gives no reason", ACCEPTED)
        return text
    head, *clauses = [part.strip() for part in text.split(";")]
    words = _WORD.findall(head)
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
    for cut in _CUT_END.split(cuts) if cuts else ():
        axis, colon, order = cut.strip().partition(":")
        if axis not in AXES:
            raise node.error(f"names an axis {axis!r}", ", ".join(AXES))
        verb, _, numbers = order.partition(" ")
        if verb in NUMBERED and NUMBERED[verb].fullmatch(numbers):
            continue
        if colon and order not in ORDERS:
            raise node.error(f"names an order {order!r}", f"{', '.join(ORDERS)}, packed 128,128,16, groups 2")


def _read_path(node: Node) -> str:
    if not isinstance(node.value, str):
        raise node.error("is not text", "position inside nested arguments, '' for a bare tensor")
    return node.value


_SPEC = ValueType(_read_spec, {"type": "string", "minLength": 1})
_PATH = ValueType(_read_path, {"type": "string"})


@dataclass(frozen=True)
class ShardRule:
    """A shard spec and the tensors that it applies to. Empty ``kind``, ``io`` and ``path`` match any.

    ``name`` is part of a canonical name, or a regular expression between slashes.
    """

    name: str = required_key(NAME_PATTERN, "names that the spec applies to", "my_gate")
    shard: str = required_key(_SPEC, "dimensions in order, each with the axis that shards it", "s b h[tp]")
    kind: str = key("", one_of(KINDS), "only rows of this kind", "activation")
    io: str = key("", one_of(("input", "output", "weight")), "only this side of a module", "output")
    path: str | None = key(None, _PATH, "only this position in the arguments", "hidden_states")


SHARDS = list_of(section(ShardRule, form="{name: part of a name, shard: spec}"), "a list of {name: …, shard: …}")


def parse_shards(node: Node) -> tuple[ShardRule, ...]:
    """Read a list of rules."""
    rules: tuple[ShardRule, ...] = SHARDS.read(node)
    return rules


def load_shards(path: str | os.PathLike[str]) -> tuple[ShardRule, ...]:
    """Read a file with ``shards`` as its only key."""
    node = Node(read_document(path), "", Context(os.fspath(path)))
    found = node.entries(("shards",))
    if "shards" not in found:
        raise node.context.error("", "has no rules", "shards: [{name: …, shard: …}]")
    return parse_shards(found["shards"])
