"""Patches: declared at import, applied late, listed, verified, reverted.

A patch names its target as text and holds a function that wraps the original; nothing happens until a `PatchSet`
applies it. What became of each is kept in the ledger, because a patch that silently did not bind is a hole in
the record. The declarations live in the top-level ``patches/`` folder, one file a Megatron area.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

PATCH_MODULES = ("arguments", "training", "schedules", "recompute", "distributed", "named_calls", "data_parallel")

Wrap = Callable[[Callable[..., Any], Any], Callable[..., Any]]


@dataclass(frozen=True)
class Patch:
    """Declaration of one patch.

    `wrap(original, events)` returns the replacement; `events` is whoever applies the set. `targets` are tried in
    order and the first that exists is patched: releases moved functions, and forks lie about their version.

    Example::

        Patch("schedules.forward_step", ("megatron.core.pipeline_parallel.schedules:forward_step",), wrap,
              phase="recording", why="microbatch and virtual stage of each forward")
    """

    id: str
    targets: tuple[str, ...]
    wrap: Wrap
    phase: str
    why: str
    required: bool = False
    sweep: bool = False


@dataclass
class Entry:
    """What became of a patch: one line of the ledger."""

    patch: Patch
    target: str = ""
    state: str = "declared"
    reason: str = ""
    fired: int = 0
    owner: Any = field(default=None, repr=False)
    name: str = ""
    original: Any = field(default=None, repr=False)
    replacement: Any = field(default=None, repr=False)
    events: Any = field(default=None, repr=False)
    inherited: bool = False
    aliases: list[Any] = field(default_factory=list, repr=False)
    swept: int = -1
    active: bool = False
    binding: object = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The line as it is written to the run directory."""
        return {
            "id": self.patch.id,
            "target": self.target or self.patch.targets[0],
            "phase": self.patch.phase,
            "state": self.state,
            "reason": self.reason,
            "fired": self.fired,
            "why": self.patch.why,
        }


class PatchError(Exception):
    """A patch that was required did not find its target."""


class PatchSet:
    """Some patches, applied and reverted together.

    Example::

        patches = PatchSet(declared("functions"), events)
        patches.apply()
        ...
        patches.revert()
    """

    def __init__(self, patches: Iterable[Patch], events: Any) -> None:
        self.entries = [Entry(patch) for patch in patches]
        self._events = events

    def apply(self) -> None:
        """Bind every patch that is not bound; applying twice is applying once."""
        for entry in self.entries:
            if not entry.active:
                _bind(entry, self._events)
        missing = [e for e in self.entries if e.patch.required and not e.active]
        if missing:
            self.revert()
            names = "; ".join(f"{e.patch.id}: none of {', '.join(e.patch.targets)} ({e.reason})" for e in missing)
            raise PatchError(f"cannot patch {names}; megatron-core is {host_version()}")

    def verify(self) -> list[str]:
        """Bind again what somebody overwrote since; returns the targets that had been lost."""
        lost = []
        for entry in self.entries:
            if entry.active and not _still_bound(entry):
                lost.append(entry.target)
                entry.active = False
                _bind(entry, self._events)
                entry.reason = "was overwritten by other code; bound again"
        return lost

    def revert(self) -> None:
        """Put every original back; a replacement that others have wrapped meanwhile stays, and passes through."""
        for entry in reversed(self.entries):
            if entry.active:
                _unbind(entry)

    def ledger(self) -> list[dict[str, Any]]:
        """All lines, in the order of declaration."""
        return [entry.as_dict() for entry in self.entries]


def declared(*phases: str) -> list[Patch]:
    """All patches of these phases, from the ``patches`` package."""
    found: list[Patch] = []
    for name in PATCH_MODULES:
        module = importlib.import_module(f"msprobe_megatron.patches.{name}")
        found.extend(patch for patch in module.PATCHES if patch.phase in phases)
    return found


def host_version() -> str:
    """Version of the megatron-core in this process, "not imported" when there is none."""
    if "megatron.core" not in sys.modules:
        return "not imported"
    # 0.6 and 0.7 do not import it themselves.
    return str(getattr(sys.modules.get("megatron.core.package_info"), "__version__", "unknown"))


def _resolve(target: str) -> tuple[Any, str] | str:
    """Owner and attribute name of ``module:Class.attribute``, or why there is none."""
    module_name, _, path = target.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        return f"{module_name} is not imported by the host"
    owner: Any = module
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
        if owner is None:
            return f"{module_name} has no {parent}"
    if not hasattr(owner, name):
        return f"{module_name} has no {path}"
    return owner, name


def _bind(entry: Entry, events: Any) -> None:
    reasons = []
    for target in entry.patch.targets:
        found = _resolve(target)
        if isinstance(found, str):
            reasons.append(found)
            continue
        entry.owner, entry.name = found
        entry.target = target
        _replace(entry, events)
        entry.state, entry.reason, entry.active = "bound", "", True
        return
    entry.state, entry.reason = "absent", "; ".join(dict.fromkeys(reasons))


def _replace(entry: Entry, events: Any) -> None:
    owner, name = entry.owner, entry.name
    space = vars(owner)
    entry.inherited = name not in space
    raw = getattr(owner, name) if entry.inherited else space[name]
    raw = _alive(raw)
    # Bound again on every recorded step: the replacement of the same function is used again.
    if entry.replacement is None or raw is not entry.original or events is not entry.events:
        _make_replacement(entry, raw, events)
    setattr(owner, name, entry.replacement)
    if entry.patch.sweep:
        # All modules are looked through when there are new ones; a patch may be bound again on every recorded step.
        known = list(sys.modules.values()) if entry.swept != len(sys.modules) else entry.aliases
        entry.swept = len(sys.modules)
        entry.aliases = list(_aliases(raw, name, owner, known))
        for module in entry.aliases:
            setattr(module, name, entry.replacement)


def _make_replacement(entry: Entry, raw: Any, events: Any) -> None:
    function = _function(raw)
    wrapped = entry.patch.wrap(function, events)

    binding = entry.binding = object()

    def live() -> bool:
        # An older replacement of the same entry may still sit below another's wrapper: only the last one speaks.
        return entry.active and entry.binding is binding

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not live():
            return function(*args, **kwargs)
        entry.fired += 1
        return wrapped(*args, **kwargs)

    replacement.__msprobe_patch__ = entry.patch.id  # type: ignore[attr-defined]
    replacement.__msprobe_self__ = replacement  # type: ignore[attr-defined]
    replacement.__msprobe_raw__ = raw  # type: ignore[attr-defined]
    replacement.__msprobe_live__ = live  # type: ignore[attr-defined]
    entry.original = raw
    entry.replacement = type(raw)(replacement) if isinstance(raw, staticmethod | classmethod) else replacement
    entry.events = events


def _function(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def _is_dead(function: Any) -> bool:
    """Whether this is a replacement of ours (not a wrapper that copied its attributes) that is switched off."""
    live = getattr(function, "__msprobe_live__", None)
    return getattr(function, "__msprobe_self__", None) is function and live is not None and not live()


def _alive(raw: Any) -> Any:
    """Step over replacements that could not be taken away in their turn, or the chain would grow with every step."""
    while _is_dead(_function(raw)):
        raw = _function(raw).__msprobe_raw__
    return raw


def _aliases(original: Any, name: str, owner: Any, modules: Iterable[Any]) -> Iterable[Any]:
    """Modules that imported the original by name before it was patched: Megatron's, and the host's own."""
    for module in modules:
        if module is owner or not isinstance(module, ModuleType) or module.__name__.startswith("msprobe_megatron"):
            continue
        if vars(module).get(name) is original:
            yield module


def _current(entry: Entry) -> Any:
    return vars(entry.owner).get(entry.name)


def _still_bound(entry: Entry) -> bool:
    """Whether our replacement is still in the chain of wrappers that the host will call."""
    current = _current(entry)
    while current is not None:
        if current is entry.replacement or getattr(current, "__msprobe_patch__", None) == entry.patch.id:
            return True
        current = (
            current.__func__
            if isinstance(current, staticmethod | classmethod)
            else getattr(current, "__wrapped__", None)
        )
    return False


def _unbind(entry: Entry) -> None:
    entry.active = False
    if _current(entry) is not entry.replacement:
        entry.state, entry.reason = "left", "other code wrapped it; it only passes through now"
        return
    if entry.inherited:
        delattr(entry.owner, entry.name)
    else:
        setattr(entry.owner, entry.name, _alive(entry.original))
    for module in entry.aliases:
        if vars(module).get(entry.name) is entry.replacement:
            setattr(module, entry.name, _alive(entry.original))
