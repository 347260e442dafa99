"""Recipe overlays: data files that say how a model's launch recipe is run under the kit.

An overlay lies beside the scripts (scripts/recipes/HOST/MODEL.yaml), is read by the launcher before any process is
started, and only ever appends to the recipe's own command line, where the last of two equal flags counts.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_megatron.config.document import read_document
from msprobe_megatron.config.errors import ConfigError

_KEYS = ("title", "match", "expects", "append", "override", "small", "environment", "probe", "notes", "demo")
_MATCH = ("recipe", "script")


@dataclass(frozen=True)
class Overlay:
    """One model of one host.

    `expects` are flags whose value the recipe should have, None for a flag without value and False for one that
    should not be there. `append` and `override` are added to the command line, `small` too where a small run is
    asked for. `demo` is the architecture, shrunk, in flags of the demo script.
    """

    name: str
    title: str
    recipes: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ("pretrain_gpt.py",)
    expects: Mapping[str, Any] = field(default_factory=dict)
    append: tuple[str, ...] = ()
    override: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    probe: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    demo: tuple[str, ...] = ()

    def matches(self, recipe: str) -> bool:
        """Whether a recipe's path looks like this model's.

        Example: ``*llama2*7b*`` matches ``examples/llama2/pretrain_llama2_7b_ptd.sh``.
        """
        return any(fnmatch.fnmatch(recipe.lower(), pattern.lower()) for pattern in self.recipes)

    def arguments(self, argv: Sequence[str], small: bool = False) -> list[str]:
        """What is put at the end of a script's arguments; a flag that is already there is not repeated."""
        words = [word for word in self.append if word not in argv]
        for table in (self.override, self.small if small else {}):
            for flag, value in table.items():
                words += _shortened(value, argv) if flag == "train-iters" else _as_words(flag, value)
        return words

    def drift(self, argv: Sequence[str]) -> list[str]:
        """Where a command line is not what this overlay was made for, one sentence each."""
        found = []
        for flag, expected in self.expects.items():
            actual = _value_of(flag, argv)
            if actual != (expected if isinstance(expected, bool) else str(expected)):
                found.append(f"--{flag} {_shown(actual)}; the overlay expects that it {_shown(expected)}")
        return found


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "is given without a value" if value else "is not given"
    return f"is {value}"


def _as_words(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}"] if value else []
    return [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]


def _shortened(iterations: Any, argv: Sequence[str]) -> list[str]:
    """Fewer iterations at the learning rates of the whole job: its schedule goes on to where the recipe's ends.

    A warm-up longer than the schedule would be refused, and a recipe that counts samples refuses iterations.
    """
    unit, count = "iters", str(iterations)
    batch = _value_of("global-batch-size", argv)
    if isinstance(_value_of("train-samples", argv), str) and isinstance(batch, str) and batch.isdecimal():
        unit, count = "samples", str(int(iterations) * int(batch))
    whole = _value_of(f"train-{unit}", argv)
    keep = isinstance(whole, str) and whole.isdecimal() and not _value_of(f"lr-decay-{unit}", argv)
    return [f"--train-{unit}", count, *([f"--lr-decay-{unit}", str(whole)] if keep else [])]


def _value_of(flag: str, argv: Sequence[str]) -> str | bool:
    """Value of a flag, the last one given; True without a value, False when it is not there."""
    found: str | bool = False
    for index, word in enumerate(argv):
        if word == f"--{flag}":
            following = argv[index + 1] if index + 1 < len(argv) else "--"
            found = True if following.startswith("--") else following
        elif word.startswith(f"--{flag}="):
            found = word.partition("=")[2]
    return found


def read(path: Path, root: Path | None = None) -> Overlay:
    """Read one overlay file; raises `ConfigError` naming the key at fault.

    Example: ``read(Path("scripts/recipes/modellink/llama2_7b.yaml")).title``.
    """
    content = read_document(path)
    name = str(path.relative_to(root).with_suffix("")) if root is not None else path.stem
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: is not an overlay; accepted: keys {', '.join(_KEYS)}")
    for key in content:
        if key not in _KEYS:
            raise ConfigError(f"{path}: {key}: unknown key; accepted: {', '.join(_KEYS)}")
    match = _table(content, "match", path)
    for key in match:
        if key not in _MATCH:
            raise ConfigError(f"{path}: match.{key}: unknown key; accepted: {', '.join(_MATCH)}")
    if not content.get("title"):
        raise ConfigError(f"{path}: title: missing; accepted: what the overlay is for, in a line")
    environment = {str(key): str(value) for key, value in _table(content, "environment", path).items()}
    return Overlay(
        name=name,
        title=str(content["title"]),
        recipes=_words(match, "recipe", path),
        scripts=_words(match, "script", path) or ("pretrain_gpt.py",),
        expects=_table(content, "expects", path),
        append=_words(content, "append", path),
        override=_table(content, "override", path),
        small=_table(content, "small", path),
        environment=environment,
        probe=_table(content, "probe", path),
        notes=_words(content, "notes", path),
        demo=tuple(word for line in _words(content, "demo", path) for word in line.split()),
    )


def _table(content: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {key}: {value!r} is not a table; accepted: key: value lines")
    return value


def _words(content: Mapping[str, Any], key: str, path: Path) -> tuple[str, ...]:
    value = content.get(key) or []
    if not isinstance(value, list):
        raise ConfigError(f"{path}: {key}: {value!r} is not a list; accepted: [one, two]")
    return tuple(map(str, value))


def all_overlays(root: Path) -> list[Overlay]:
    """Every overlay below `root`, by name."""
    return [read(path, root) for path in sorted(root.glob("*/*.yaml"))]


def find(name: str, root: Path) -> Overlay:
    """The overlay called HOST/MODEL (or MODEL alone where only one host has it), or of a file.

    Example: ``find("modellink/llama2_7b", Path("scripts/recipes"))``.
    """
    if name.endswith((".yaml", ".yml")):
        return read(Path(name))
    known = {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.glob("*/*.yaml"))}
    hits = [key for key in known if name in (key, key.rpartition("/")[2])]
    if len(hits) != 1:
        problem = "is not an overlay" if not hits else f"may be {' or '.join(hits)}"
        raise ConfigError(f"--overlay: {name!r} {problem}; accepted: {', '.join(known) or 'FILE.yaml'}")
    return read(known[hits[0]], root)
