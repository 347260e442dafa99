"""The ``dump`` section: what is recorded of modules and API calls on the chosen steps."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from msprobe_megatron.config.document import Node
from msprobe_megatron.config.keys import (
    BOOLEAN,
    Contradiction,
    ValueType,
    integer,
    key,
    keys_of,
    list_of,
    list_schema,
    one_of,
    or_null,
    other_settings,
    read_section,
    refuse_contradictions,
    section,
    section_schema,
    some_of,
)
from msprobe_megatron.config.name_patterns import NAME_PATTERNS
from msprobe_megatron.config.selection import NUMBERS, StepSelection

Level = Literal["L0", "L1", "mix", "debug"]
Task = Literal["statistics", "tensor", "structure", "nonfinite"]
Apis = Literal["core", "focus", "all"]
DataMode = Literal["all", "forward", "backward", "input", "output"]
LEVELS: tuple[str, ...] = get_args(Level)
DATA_MODES: tuple[str, ...] = get_args(DataMode)

_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_ACCEPTED_FUNCTION = "module:function or module:Class.method, such as mypackage.ops:fused_gelu"
_ACCEPTED_WINDOW = "[] or [name of the first, name of the last]"


@dataclass(frozen=True)
class Slice:
    """A part of tensors: elements ``begin`` to ``end`` (exclusive) of dimension ``dim``, where its size is ``size``."""

    dim: int = key(0, or_null(integer(0)), "dimension that is cut", "1")
    size: int | None = key(None, or_null(integer(1)), "only tensors whose dimension has this size", "4096")
    begin: int = key(0, or_null(integer(0)), "first element", "16")
    end: int | None = key(None, or_null(integer(1)), "element after the last one; to the end if absent", "32")


def _read_slice(node: Node) -> Slice:
    # A null is a key left out, as in msprobe.
    given = {name: child.value for name, child in node.entries(keys_of(Slice)).items() if child.value is not None}
    if not given:
        raise node.error("cuts nothing", "some of dim, size, begin, end")
    part = read_section(Slice, Node(given, node.path, node.context))
    if part.end is not None and part.end <= part.begin:
        end = Node(part.end, f"{node.path}.end", node.context)
        raise end.error(f"is not beyond begin, which is {part.begin}", "a number above begin")
    return part


def _read_digest(node: Node) -> bool | str:
    if isinstance(node.value, bool):
        return node.value
    if node.value not in ("md5", "crc32"):
        raise node.error("is not a digest", "false, true, md5, crc32")
    return str(node.value)


def _read_window(node: Node) -> tuple[str, ...]:
    names = tuple(item.text() for item in node.items(_ACCEPTED_WINDOW))
    if len(names) not in (0, 2):
        raise node.error(f"has {len(names)} names", _ACCEPTED_WINDOW)
    return names


def _read_data_mode(node: Node) -> tuple[str, ...]:
    modes: tuple[str, ...] = some_of(DATA_MODES).read(node)
    if "all" in modes and len(modes) > 1:
        raise node.error("mixes all with others", "[all], or some of forward, backward, input, output")
    return modes


def _read_functions(node: Node) -> tuple[str, ...]:
    names = []
    for item in node.items(f"a list; each item {_ACCEPTED_FUNCTION}"):
        text = item.text(_ACCEPTED_FUNCTION)
        if _FUNCTION.fullmatch(text) is None:
            raise item.error("does not say where the function is", _ACCEPTED_FUNCTION)
        names.append(text)
    return tuple(dict.fromkeys(names))


_SLICE = ValueType(_read_slice, section_schema(Slice), section=Slice)
_DIGEST = ValueType(_read_digest, {"enum": [False, True, "md5", "crc32"]})
_WINDOW = ValueType(_read_window, {**list_schema({"type": "string"}), "maxItems": 2})
_DATA_MODE = ValueType(_read_data_mode, some_of(DATA_MODES).schema)
_FUNCTIONS = ValueType(_read_functions, list_schema({"type": "string", "pattern": f"^{_FUNCTION.pattern}$"}))


@dataclass(frozen=True)
class DumpConfig:
    """The ``dump`` section: what is recorded of modules and API calls.

    ``list`` holds parts of names, or regular expressions between slashes; empty selects every name. An axis that
    ``data_mode`` leaves out (forward and backward, input and output) is recorded on both sides. ``scope`` is a window
    from one name to another. ``tensor_list`` names tensors that are saved in addition to the statistics of all.
    ``slice`` records a part of every tensor. ``functions`` names more functions, ``module:function``, to record as API
    calls.
    """

    level: Level = key(
        "L0", one_of(LEVELS), "modules (L0), API calls (L1), both (mix), or explicit save() calls (debug)", "mix"
    )
    task: Task = key(
        "statistics",
        one_of(get_args(Task)),
        "statistics, whole tensors, only names and call stacks, or only the first non-finite call",
        "tensor",
    )
    digest: bool | Literal["md5", "crc32"] = key(
        False, _DIGEST, "a 64-bit digest of every tensor, or msprobe's md5 or crc32", "true"
    )
    sketch: int = key(
        0, integer(0, 4096), "size of a sketch from which two runs estimate their distance; 0 for none", "64"
    )
    list: tuple[str, ...] = key((), NAME_PATTERNS, "names that are recorded", r"[linear_fc2, '/layers\.[0-3]\./']")
    scope: tuple[str, ...] = key(
        (), _WINDOW, "record from the first of two names to the last", "[decoder.layers.0, decoder.layers.2]"
    )
    data_mode: tuple[DataMode, ...] = key(
        ("all",), _DATA_MODE, "directions and sides that are recorded", "[forward, output]"
    )
    stacks: bool = key(True, BOOLEAN, "record the call stack of every call site", "false")
    microbatches: StepSelection | None = key(None, NUMBERS, "microbatches that are recorded", "[0]")
    layers: StepSelection | None = key(None, NUMBERS, "global layer numbers that are recorded", '["0-3"]')
    apis: Apis = key("focus", one_of(get_args(Apis)), "preset of API calls that are recorded", "all")
    tensor_list: tuple[str, ...] = key(
        (), NAME_PATTERNS, "names whose whole tensors are saved in addition to the statistics", "[core_attention]"
    )
    slice: tuple[Slice, ...] = key(
        (),
        list_of(_SLICE, "a list such as [{dim: 0, begin: 0, end: 16}]"),
        "record only a part of every tensor",
        "[{dim: 0, begin: 0, end: 16}]",
    )
    functions: tuple[str, ...] = key(
        (), _FUNCTIONS, "more functions to record as API calls", "[mypackage.ops:fused_gelu]"
    )

    def describe(self) -> str:
        """One line for `msprobe-megatron validate`."""
        what = {"L0": "modules", "L1": "API calls", "mix": "modules and API calls", "debug": "save() calls"}[self.level]
        names = f"names matching {', '.join(self.list)}" if self.list else "all names"
        parts = [
            f"{self.task} of {what} ({self.level}): {'/'.join(self.data_mode)} data of {names}",
            f"digest {'sum64' if self.digest is True else self.digest}" if self.digest else "",
            f"sketch of {self.sketch}" if self.sketch else "",
            f"microbatches {self.microbatches.describe()}" if self.microbatches else "",
            f"layers {self.layers.describe()}" if self.layers else "",
            f"from {self.scope[0]} to {self.scope[1]}" if self.scope else "",
            "with call stacks" if self.stacks else "without call stacks",
            *other_settings(self, *_DESCRIBED),
        ]
        return ", ".join(filter(None, parts))


_DESCRIBED = ("level", "task", "digest", "sketch", "list", "scope", "data_mode", "stacks", "microbatches", "layers")
_CONTRADICTIONS: tuple[Contradiction[DumpConfig], ...] = (
    Contradiction(
        "digest",
        lambda dump: dump.task == "structure" and dump.digest is not False,
        "has no values to work on: task is structure",
        "task statistics",
    ),
    Contradiction(
        "sketch",
        lambda dump: dump.task == "structure" and dump.sketch,
        "has no values to work on: task is structure",
        "task statistics",
    ),
    Contradiction("scope", lambda dump: dump.scope and dump.list, "stands beside a list", "either list or scope"),
    Contradiction(
        "scope",
        lambda dump: dump.scope and dump.level == "debug",
        "has no calls to work on: level is debug",
        "L0, L1, mix",
    ),
    Contradiction(
        "tensor_list",
        lambda dump: dump.tensor_list and dump.task != "statistics",
        "belongs to task statistics; task is {task}",
        "task statistics, or names in list",
    ),
    Contradiction(
        "slice",
        lambda dump: dump.slice and dump.task == "structure",
        "has no values to work on: task is structure",
        "task statistics or tensor",
    ),
    Contradiction(
        "slice",
        lambda dump: dump.slice and (dump.digest is True or dump.sketch),
        "leaves no whole tensor for digests and sketches to add up to",
        "digest: false and sketch: 0",
    ),
    Contradiction(
        "functions",
        lambda dump: dump.functions and dump.level not in ("L1", "mix"),
        "are API calls; level is {level}",
        "level L1 or mix",
    ),
)
DUMP = section(DumpConfig, lambda config, node: refuse_contradictions(config, _CONTRADICTIONS, node))
