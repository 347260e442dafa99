"""Maps of names and forms between Megatron and another implementation: YAML files, read strictly.

The kit's own lie in `maps/`; a user's file may extend one of them. A rule says where a tensor of Megatron comes from; a
list of rules is tried in order, and the first counts whose sources are all there: in memory, in a checkpoint and in an
engine the same weights are stacked, apart or fused::

    map: hf:mine
    extends: hf:llama
    architectures: [MineForCausalLM]
    layer_weights:
      self_attention.linear_qkv.weight:
        - {qkv: [self_attn.q_proj.weight, self_attn.k_proj.weight, self_attn.v_proj.weight]}
        - {qkv_blocks: self_attn.qkv_proj.weight}
      pre_mlp_layernorm.weight: post_attention_layernorm.weight
      mlp.linear_fc1.bias: null
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_megatron.analysis.align.forms import FORMS
from msprobe_megatron.config.document import ConfigError, Context, Node, read_document

_MAPS = Path(__file__).parent / "maps"
_KEYS = (
    "map",
    "extends",
    "architectures",
    "their_layers",
    "weights",
    "layer_weights",
    "tensors",
    "layer_tensors",
    "settings",
    "notes",
)
_TABLES = ("weights", "layer_weights", "tensors", "layer_tensors", "settings")
_OURS = "decoder.layers.{l}."


@dataclass(frozen=True)
class Rule:
    """Where one tensor of Megatron comes from: a form and its sources."""

    form: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """A setting of Megatron, what the other side calls it, and where a difference shows first."""

    ours: str
    theirs: tuple[str, ...]
    named: str
    at: str
    default: Any = None


@dataclass(frozen=True)
class NameMap:
    """A map; targets and sources may hold {l} for the layer and {e} for the expert."""

    name: str
    architectures: tuple[str, ...]
    weights: dict[str, tuple[Rule, ...]]
    tensors: dict[str, tuple[Rule, ...]]
    settings: dict[str, Setting]
    notes: tuple[str, ...] = ()
    source: str = ""
    their_layers: str = field(default="model.layers")


def known_maps() -> dict[str, Path]:
    """The maps of the kit by name."""
    return {f"hf:{path.stem}": path for path in sorted(_MAPS.glob("*.yaml"))}


def load_map(name: str) -> NameMap:
    """A map of the kit by its name (`hf:llama`), or one of the user by its file; raises `ConfigError`."""
    path = known_maps().get(name, Path(name))
    if not path.is_file():
        raise ConfigError(f"--map {name!r}: accepted: {', '.join(known_maps())}, or a YAML file")
    return _read(path)


def map_of(architecture: str) -> NameMap | None:
    """The kit's map for the class of a model, such as LlamaForCausalLM; None if there is none.

    Example::

        >>> map_of("Qwen2ForCausalLM").name
        'hf:qwen2'
    """
    for path in known_maps().values():
        found = _read(path)
        if architecture in found.architectures:
            return found
    return None


def _read(path: Path) -> NameMap:
    given = Node(read_document(path), "", Context(str(path))).entries(_KEYS)
    tables, theirs = _tables(path, ())
    prefix = f"{theirs}.{{l}}."
    return NameMap(
        given["map"].text() if "map" in given else str(path),
        tuple(item.text() for item in given["architectures"].items()) if "architectures" in given else (),
        {**_rules(tables["weights"], "", ""), **_rules(tables["layer_weights"], _OURS, prefix)},
        {**_rules(tables["tensors"], "", ""), **_rules(tables["layer_tensors"], _OURS, prefix)},
        {key: _setting(key, node) for key, node in tables["settings"].items()},
        tuple(item.text() for item in given["notes"].items()) if "notes" in given else (),
        str(path),
        theirs,
    )


def _tables(path: Path, below: tuple[Path, ...]) -> tuple[dict[str, dict[str, Node]], str]:
    """The tables of a map with those of the maps it extends, and what the other side calls its list of layers."""
    given = Node(read_document(path), "", Context(str(path))).entries(_KEYS)
    tables: dict[str, dict[str, Node]] = {name: {} for name in _TABLES}
    theirs = "model.layers"
    base = given.get("extends")
    if base is not None:
        upper = known_maps().get(base.text(), path.parent / base.text())
        if upper in (*below, path) or not upper.is_file():
            raise base.error("is not a map", f"{', '.join(known_maps())}, or another file beside this one")
        tables, theirs = _tables(upper, (*below, path))
    for name in _TABLES:
        for key, node in given[name].mapping().items() if name in given else ():
            if node.value is None:
                tables[name].pop(key, None)
            else:
                tables[name][key] = node
    return tables, given["their_layers"].text() if "their_layers" in given else theirs


def _rules(table: Mapping[str, Node], ours: str, theirs: str) -> dict[str, tuple[Rule, ...]]:
    found = {}
    for target, node in table.items():
        several = node.items() if isinstance(node.value, list) else [node]
        found[f"{ours}{target}"] = tuple(_rule(item, theirs) for item in several)
    return found


def _rule(node: Node, theirs: str) -> Rule:
    if isinstance(node.value, str):
        return Rule("same", (f"{theirs}{node.value}",))
    entries = node.entries(tuple(FORMS))
    if len(entries) != 1:
        raise node.error("is not one form", f"a name, or one of {', '.join(FORMS)} with its sources")
    ((form, sources),) = entries.items()
    names = [item.text() for item in sources.items()] if isinstance(sources.value, list) else [sources.text()]
    return Rule(form, tuple(f"{theirs}{name}" for name in names))


def _setting(key: str, node: Node) -> Setting:
    entries = node.entries(("theirs", "named", "at", "default"))
    given = entries.get("theirs")
    names = (
        () if given is None else [i.text() for i in given.items()] if isinstance(given.value, list) else [given.text()]
    )
    named = entries["named"].text() if "named" in entries else key
    default = entries["default"].value if "default" in entries else None
    return Setting(key, tuple(names), named, entries["at"].text() if "at" in entries else "", default)


_PLACE = re.compile(r"(?P<name>\S+) (?P<io>input|output)(?: (?P<path>\S+))?$")


def place(text: str) -> tuple[str, str, str]:
    """Name, io and path of a tensor as maps write it.

    Example::

        >>> place("decoder.layers.{l}.mlp output 0")
        ('decoder.layers.{l}.mlp', 'output', '0')
    """
    match = _PLACE.match(text)
    if match is None:
        raise ConfigError(f"map: {text!r} names no tensor; accepted: NAME input|output PATH")
    return match["name"], match["io"], match["path"] or ""
