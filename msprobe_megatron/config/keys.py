"""Keys of the probe file, each declared once: default, accepted values, meaning and example.

A section is a frozen dataclass whose fields are made by ``key``. Everything else is derived from these declarations:
how a section is read and validated (``section``), the summary of `msprobe-megatron validate` (``other_settings``), the
reference (``reference.py``) and the JSON Schema (``section_schema``). So a new key is one new field.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from msprobe_megatron.config.document import Node

T = TypeVar("T")
Schema = dict[str, Any]
MANY = 10**9
_METADATA = "probe file key"


def as_written(value: Any) -> Any:
    """A value as it stands in a document; of a section, the keys that differ from their defaults."""
    if isinstance(value, tuple):
        return [as_written(item) for item in value]
    if isinstance(value, Path):
        return str(value) if value.is_absolute() else f"./{value}"
    if dataclasses.is_dataclass(value):
        keys = keys_of(type(value))
        changed = {name: getattr(value, name) for name in keys if getattr(value, name) != keys[name].default}
        return {name: keys[name].type.write(setting) for name, setting in changed.items()}
    return value


@dataclasses.dataclass(frozen=True)
class ValueType:
    """A type of values in the probe file.

    ``read`` turns a node into a value or raises ``ConfigError``; its refusal says what is accepted. ``schema`` is the
    JSON Schema of what can be written; it may accept more than ``read``, never less. ``write`` turns a value back into
    what stands in a document. ``section`` is the dataclass whose keys stand below, and ``below`` where: directly (""),
    in each item of a list ("[…]") or under each name of a mapping (".NAME").
    """

    read: Callable[[Node], Any]
    schema: Mapping[str, Any]
    write: Callable[[Any], Any] = as_written
    section: type | None = None
    below: str = ""


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a section, as declared by ``key``; a key without default is required."""

    type: ValueType
    meaning: str
    example: str
    default: Any

    @property
    def required(self) -> bool:
        """Whether a section without this key is refused."""
        return self.default is dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Contradiction(Generic[T]):
    """Settings of a section that exclude each other: ``key`` is refused where ``holds``.

    ``problem`` may name other settings in braces, such as ``{mode}``.
    """

    key: str
    holds: Callable[[T], object]
    problem: str
    accepted: str


def key(default: T, value_type: ValueType, meaning: str, example: str) -> T:
    """Declare a key as a field of a section's dataclass.

    Example::

        >>> @dataclasses.dataclass(frozen=True)
        ... class Section:
        ...     every: int = key(1, integer(1), "interval between two checks, in steps", "100")
        >>> Section().every, keys_of(Section)["every"].example
        (1, '100')
    """
    declared = Key(value_type, meaning, example, default)
    return dataclasses.field(default=default, metadata={_METADATA: declared})


def required_key(value_type: ValueType, meaning: str, example: str) -> Any:
    """Declare a key without a default."""
    return dataclasses.field(metadata={_METADATA: Key(value_type, meaning, example, dataclasses.MISSING)})


def keys_of(section_class: type) -> dict[str, Key]:
    """The keys of a section by name, in the order of their declaration; fields that are not keys are left out."""
    fields = dataclasses.fields(section_class)
    return {field.name: field.metadata[_METADATA] for field in fields if _METADATA in field.metadata}


def switches(section_class: type) -> tuple[str, ...]:
    """The names of the boolean keys of a section."""
    return tuple(name for name, declared in keys_of(section_class).items() if declared.type is BOOLEAN)


def read_section(section_class: type[T], node: Node, form: str = "", **other_fields: Any) -> T:
    """Read a mapping into a section; ``form`` shows how one is written, for the refusal of one that lacks a key."""
    keys = keys_of(section_class)
    given = {name: keys[name].type.read(child) for name, child in node.entries(keys).items()}
    for name, declared in keys.items():
        if declared.required and name not in given:
            raise node.error(f"has no {name}", form)
    return section_class(**given, **other_fields)


def section(
    section_class: type[T], check: Callable[[T, Node], None] | None = None, form: str = "", below: str = ""
) -> ValueType:
    """The type of a key that holds a section; ``check`` raises ``ConfigError`` for settings that do not go together."""

    def read(node: Node) -> T:
        config = read_section(section_class, node, form)
        if check is not None:
            check(config, node)
        return config

    return ValueType(read, section_schema(section_class), section=section_class, below=below)


def refuse_contradictions(config: T, rules: Sequence[Contradiction[T]], node: Node) -> None:
    """Raise ``ConfigError`` for the first rule that holds."""
    for rule in rules:
        if rule.holds(config):
            value = keys_of(type(config))[rule.key].type.write(getattr(config, rule.key))
            at_fault = Node(value, f"{node.path}.{rule.key}", node.context)
            raise at_fault.error(rule.problem.format_map(vars(config)), rule.accepted)


def refuse_all_off(config: object, names: Sequence[str], node: Node) -> None:
    """Raise ``ConfigError`` for a section in which none of these settings is on."""
    if not any(getattr(config, name) for name in names):
        raise node.context.error(node.path, "requests nothing", f"at least one of {', '.join(names)}")


def section_schema(section_class: type) -> Schema:
    """The JSON Schema of a section."""
    keys = keys_of(section_class)
    properties = {}
    for name, declared in keys.items():
        entry = {**declared.type.schema, "description": declared.meaning}
        # A section's default is the defaults of its keys.
        is_section = declared.type.section is not None and dataclasses.is_dataclass(declared.default)
        if not declared.required and declared.default is not None and not is_section:
            entry["default"] = declared.type.write(declared.default)
        properties[name] = entry
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    required = [name for name, declared in keys.items() if declared.required]
    return {**schema, "required": required} if required else schema


def as_text(value: Any) -> str:
    """A value of a document as YAML text on one line."""
    if isinstance(value, bool | None):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {as_text(item)}" for name, item in value.items()) + "}"
    return str(value)


def other_settings(config: object, *mentioned: str) -> list[str]:
    """Settings that differ from their defaults, apart from those ``mentioned``: ``["times: 2"]``."""
    return [f"{name}: {as_text(value)}" for name, value in as_written(config).items() if name not in mentioned]


BOOLEAN = ValueType(lambda node: node.boolean(), {"type": "boolean"})
POSITIVE_NUMBER = ValueType(lambda node: node.positive_number(), {"type": "number", "exclusiveMinimum": 0})


def integer(low: int, high: int = MANY) -> ValueType:
    """Whole numbers from ``low`` to ``high``."""
    return ValueType(lambda node: node.integer(low, high), {"type": "integer", "minimum": low, "maximum": high})


def one_of(words: Sequence[str]) -> ValueType:
    """One of these words."""
    return ValueType(lambda node: node.choice(words), {"enum": list(words)})


def some_of(words: Sequence[str], empty: bool = False) -> ValueType:
    """A list of these words; duplicates are dropped, the order is kept."""

    def read(node: Node) -> tuple[str, ...]:
        items = node.items(f"a list of {', '.join(words)}")
        if not items and not empty:
            raise node.error("selects nothing", ", ".join(words))
        return tuple(dict.fromkeys(item.choice(words) for item in items))

    return ValueType(read, list_schema({"enum": list(words)}, 0 if empty else 1))


def list_of(item_type: ValueType, accepted: str) -> ValueType:
    """A list whose items have one type."""

    def read(node: Node) -> tuple[Any, ...]:
        return tuple(item_type.read(item) for item in node.items(accepted))

    def write(values: tuple[Any, ...]) -> list[Any]:
        return [item_type.write(value) for value in values]

    return ValueType(read, list_schema(item_type.schema), write, item_type.section, "[…]")


def or_null(value_type: ValueType) -> ValueType:
    """The values of a type, or null."""
    return ValueType(
        lambda node: None if node.value is None else value_type.read(node),
        any_schema([value_type.schema, {"type": "null"}]),
        lambda value: None if value is None else value_type.write(value),
    )


def list_schema(items: Mapping[str, Any], at_least: int = 0) -> Schema:
    """The JSON Schema of a list."""
    schema: Schema = {"type": "array", "items": dict(items)}
    return {**schema, "minItems": at_least} if at_least else schema


def any_schema(schemas: Iterable[Mapping[str, Any]]) -> Schema:
    """The JSON Schema of values that fit any of these."""
    return {"anyOf": [dict(schema) for schema in schemas]}
