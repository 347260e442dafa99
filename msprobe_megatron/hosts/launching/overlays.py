"""Recipe overlays: data files that say how a model's launch recipe is run under the kit.

An overlay lies beside the scripts (scripts/recipes/HOST/MODEL.yaml), is read by the launcher before any process is
started, and only appends to the recipe's own command line, where the last of two equal flags counts. A job that it
makes shorter or smaller is not to save over the recipe's checkpoints: `cuts` says so, the launcher sees to it.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_megatron.config.document import ConfigError, read_document

_KEYS = ("title", "match", "expects", "append", "override", "small", "environment", "probe", "notes", "demo")
_MATCH = ("recipe", "script")
_NOTE = ("unless", "text")
_TRACKER = "latest_checkpointed_iteration.txt"
# Which schedule of the learning rate counts, the checkpoint's or the job's; without either they have to be the same.
_SCHEDULES = (
    "use-checkpoint-opt_param-scheduler",
    "override-opt_param-scheduler",
    "use-checkpoint-opt-param-scheduler",
    "override-opt-param-scheduler",
)
# An overlay that has these among `append` cuts the job as `override` would.
_CUTTING = ("--train-iters", "--train-samples", "--exit-interval", "--exit-duration-in-mins", "--num-layers")


@dataclass(frozen=True)
class Overlay:
    """One model of one host.

    `expects` are flags whose value the recipe should have, None for a flag without value and False for one that
    should not be there. `append` and `override` are added to the command line, `small` too where a small run is
    asked for. `demo` is the architecture, shrunk, in flags of the demo script. `notes_unless` are notes that hold
    where a flag is not given, with that flag.
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
    notes_unless: tuple[tuple[str, str], ...] = ()
    demo: tuple[str, ...] = ()

    def matches(self, recipe: str) -> bool:
        """Whether a recipe's path looks like this model's."""
        return any(fnmatch.fnmatch(recipe.lower(), pattern.lower()) for pattern in self.recipes)

    def arguments(self, argv: Sequence[str], small: bool = False) -> list[str]:
        """What is put at the end of a script's arguments; a flag that is already there is not repeated."""
        words = [word for word in self.append if word not in argv]
        for table in (self.override, self.small if small else {}):
            for flag, value in table.items():
                words += _shortened(value, argv) if flag == "train-iters" else _as_words(flag, value)
        return words

    def cuts(self, small: bool = False) -> bool:
        """Whether the job is no longer the recipe's: shorter, smaller, or with another value of some flag."""
        return bool(
            self.override or (small and self.small) or any(word.partition("=")[0] in _CUTTING for word in self.append)
        )

    def notes_on(self, argv: Sequence[str]) -> list[str]:
        """The notes that depend on the recipe's flags and hold for these."""
        return [text for flag, text in self.notes_unless if value_of(flag, argv) is False]

    def drift(self, argv: Sequence[str]) -> list[str]:
        """Where a command line is not what this overlay was made for, one sentence each."""
        found = []
        for flag, expected in self.expects.items():
            actual = value_of(flag, argv)
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
    """Fewer iterations, from where the job starts, at the learning rates of the whole job.

    Its schedule goes on to where the recipe's ends: a warm-up longer than the schedule would be refused. So are
    iterations where a recipe counts samples, and a checkpoint's schedule of another length than the job's.
    """
    unit, start = "iters", start_of(argv)
    count = start + int(iterations)
    batch = value_of("global-batch-size", argv)
    if isinstance(value_of("train-samples", argv), str) and isinstance(batch, str) and batch.isdecimal():
        if value_of("rampup-batch-size", argv):
            count -= start  # how many samples the start is at is not known
        unit, count = "samples", count * int(batch)
    whole = value_of(f"train-{unit}", argv)
    keep = isinstance(whole, str) and whole.isdecimal() and not value_of(f"lr-decay-{unit}", argv)
    words = [f"--train-{unit}", str(count), *([f"--lr-decay-{unit}", str(whole)] if keep else [])]
    if start and not any(value_of(flag, argv) for flag in ("no-load-optim", *_SCHEDULES)):
        words.append(f"--{_SCHEDULES[0]}")
    return words


def start_of(argv: Sequence[str]) -> int:
    """The iteration that the checkpoint of `--load` is at, as far as can be read here; 0 of a job that begins anew."""
    load, step = value_of("load", argv), value_of("ckpt-step", argv)
    if not isinstance(load, str) or value_of("finetune", argv):
        return 0
    reached = step if isinstance(step, str) else ""
    # What cannot be read here is the job's to complain about.
    with contextlib.suppress(OSError):
        reached = reached or Path(load, _TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    return int(reached) if reached.isdecimal() else 0


def value_of(flag: str, argv: Sequence[str]) -> str | bool:
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
    """Read one overlay file; raises `ConfigError` naming the key at fault."""
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
    notes, notes_unless = _notes(content, path)
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
        notes=notes,
        notes_unless=notes_unless,
        demo=tuple(word for line in _words(content, "demo", path) for word in line.split()),
    )


def _notes(content: Mapping[str, Any], path: Path) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    always: list[str] = []
    unless: list[tuple[str, str]] = []
    value = content.get("notes") or []
    for note in value if isinstance(value, list) else []:
        if not isinstance(note, dict):
            always.append(str(note))
        elif set(note) == set(_NOTE):
            unless.append((str(note["unless"]), str(note["text"])))
        else:
            raise ConfigError(f"{path}: notes: {note!r} is no note; accepted: a line, or {{unless: FLAG, text: LINE}}")
    _words(content, "notes", path)
    return tuple(always), tuple(unless)


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
    """The overlay called HOST/MODEL (or MODEL alone where only one host has it), or of a file."""
    if name.endswith((".yaml", ".yml")):
        return read(Path(name))
    known = {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.glob("*/*.yaml"))}
    hits = [key for key in known if name in (key, key.rpartition("/")[2])]
    if len(hits) != 1:
        problem = "is not an overlay" if not hits else f"may be {' or '.join(hits)}"
        raise ConfigError(f"--overlay: {name!r} {problem}; accepted: {', '.join(known) or 'FILE.yaml'}")
    return read(known[hits[0]], root)
