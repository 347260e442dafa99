"""Patches: declared at import, applied late, listed, verified, reverted.

A patch names its target as text and holds a function that wraps the original; nothing happens until a `PatchSet`
applies it. The ledger keeps the outcome of each, because a patch that silently did not bind is a hole in the
record. The declarations live in the top-level ``patches/`` folder, one file per area of Megatron.

`when_imported` runs a function as soon as a module has been imported, by whatever code: a patch is then applied before
other modules bind the function's name, and without importing Megatron ourselves.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from msprobe_megatron.job.patching.attributes import Attribute, PatchError, leads_to, unwrapped

Wrap = Callable[[Callable[..., Any], Any], Callable[..., Any]]


@dataclass(frozen=True)
class Patch:
    """Declaration of one patch.

    `wrap(original, events)` returns the replacement; `events` is the object that the `PatchSet` was made with.
    `targets` are tried in order and the first that exists is patched: releases moved functions, and the version that
    a fork reports cannot be relied on. `sweep` also patches modules that imported the function by name.
    """

    id: str
    targets: tuple[str, ...]
    wrap: Wrap
    phase: str
    why: str
    required: bool = False
    sweep: bool = False
    owner: type | None = None
    """The class that stores the function, where no name leads to it: the target is then only text."""


@dataclass
class Entry:
    """The outcome of one patch: a line of the ledger."""

    patch: Patch
    target: str = ""
    state: str = "declared"
    reason: str = ""
    fired: int = 0
    attribute: Attribute | None = field(default=None, repr=False)
    original: Any = field(default=None, repr=False)
    replacement: Any = field(default=None, repr=False)
    events: Any = field(default=None, repr=False)
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


class PatchSet:
    """Patches that are applied and reverted together."""

    def __init__(self, patches: Iterable[Patch], events: Any) -> None:
        self.entries = [Entry(patch) for patch in patches]
        self._events = events

    def apply(self) -> None:
        """Bind every patch that is not bound. Idempotent.

        Raises `PatchError`, with nothing left patched, if a required patch finds none of its targets.
        """
        for entry in self.entries:
            if not entry.active:
                _bind(entry, self._events)
        missing = [e for e in self.entries if e.patch.required and not e.active]
        if missing:
            self.revert()
            names = "; ".join(f"{e.patch.id}: none of {', '.join(e.patch.targets)} ({e.reason})" for e in missing)
            raise PatchError(f"cannot patch {names}; megatron-core is {host_version()}")

    def extend(self, patches: Iterable[Patch]) -> None:
        """Add those that are not among them; `apply` binds them."""
        known = {(entry.patch.id, entry.patch.owner) for entry in self.entries}
        self.entries += [Entry(patch) for patch in patches if (patch.id, patch.owner) not in known]

    def verify(self) -> list[str]:
        """Bind again what other code has overwritten since; returns those targets."""
        lost = []
        for entry in self.entries:
            if entry.active and not _still_bound(entry):
                lost.append(entry.target)
                entry.active = False
                _bind(entry, self._events)
                entry.reason = "was overwritten by other code; bound again"
        return lost

    def revert(self) -> None:
        """Restore every original. A replacement that other code has wrapped since stays, and only passes through."""
        for entry in reversed(self.entries):
            if entry.active:
                _unbind(entry)

    def ledger(self) -> list[dict[str, Any]]:
        """All lines, in the order of declaration."""
        return [entry.as_dict() for entry in self.entries]


def declared(*phases: str) -> list[Patch]:
    """All patches of these phases, from the modules of the ``patches`` package.

    A module has them as ``PATCHES``, and those that depend on the classes there are now as a function ``overrides``.
    """
    package = importlib.import_module("msprobe_megatron.patches")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    every = [(*getattr(module, "PATCHES", ()), *getattr(module, "overrides", list)()) for module in modules]
    return [patch for some in every for patch in some if patch.phase in phases]


def host_version() -> str:
    """Version of the megatron-core in this process, "not imported" when there is none."""
    if "megatron.core" not in sys.modules:
        return "not imported"
    # 0.6 and 0.7 do not import it themselves.
    return str(getattr(sys.modules.get("megatron.core.package_info"), "__version__", "unknown"))


def _resolve(target: str) -> Attribute | str:
    """The function that ``module:Class.attribute`` names, or the reason why there is none to patch."""
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
    try:
        return Attribute(owner, name)
    except PatchError as error:
        return str(error)


def _of_class(owner: type, target: str) -> Attribute | str:
    try:
        return Attribute(owner, target.rpartition(".")[2])
    except PatchError as error:
        return str(error)


def _bind(entry: Entry, events: Any) -> None:
    reasons = []
    for target in entry.patch.targets:
        found = _resolve(target) if entry.patch.owner is None else _of_class(entry.patch.owner, target)
        if isinstance(found, str):
            reasons.append(found)
            continue
        entry.attribute, entry.target = found, target
        _replace(entry, found, events)
        entry.state, entry.reason, entry.active = "bound", "", True
        return
    entry.state, entry.reason = "absent", "; ".join(dict.fromkeys(reasons))


def _replace(entry: Entry, attribute: Attribute, events: Any) -> None:
    raw = _without_disabled(attribute.raw)
    # Bound again on every recorded step: the replacement of the same function is used again.
    if entry.replacement is None or raw is not entry.original or events is not entry.events:
        _make_replacement(entry, attribute, raw, events)
    attribute.store(entry.replacement)
    if entry.patch.sweep:
        # Search all modules only when there are new ones: a patch may be bound again on every recorded step.
        known = list(sys.modules.values()) if entry.swept != len(sys.modules) else entry.aliases
        entry.swept = len(sys.modules)
        entry.aliases = list(_aliases(raw, attribute, known))
        for module in entry.aliases:
            setattr(module, attribute.name, entry.replacement)


def _make_replacement(entry: Entry, attribute: Attribute, raw: Any, events: Any) -> None:
    function = unwrapped(raw)
    wrapped = entry.patch.wrap(function, events)

    binding = entry.binding = object()

    def live() -> bool:
        # An older replacement of the same entry may still be in the chain, below a wrapper of other code.
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
    entry.replacement = attribute.of_same_kind(replacement)
    entry.events = events


def _is_disabled(function: Any) -> bool:
    """Whether this is a replacement of ours (not a wrapper that copied its attributes) that only passes through."""
    live = getattr(function, "__msprobe_live__", None)
    return getattr(function, "__msprobe_self__", None) is function and live is not None and not live()


def _without_disabled(raw: Any) -> Any:
    """Skip our disabled replacements that could not be removed, or the chain grows with every recorded step."""
    while _is_disabled(unwrapped(raw)):
        raw = unwrapped(raw).__msprobe_raw__
    return raw


def _aliases(original: Any, attribute: Attribute, modules: Iterable[Any]) -> Iterable[Any]:
    """Modules that imported the original by name before it was patched: Megatron's, and the host's own."""
    for module in modules:
        if module is attribute.owner or not isinstance(module, ModuleType):
            continue
        if not module.__name__.startswith("msprobe_megatron") and vars(module).get(attribute.name) is original:
            yield module


def _still_bound(entry: Entry) -> bool:
    """Whether our replacement is still in the chain of wrappers that the host will call."""

    def ours(found: Any) -> bool:
        return found is entry.replacement or getattr(found, "__msprobe_patch__", None) == entry.patch.id

    return entry.attribute is not None and leads_to(entry.attribute.current(), ours)


def _unbind(entry: Entry) -> None:
    entry.active = False
    attribute = entry.attribute
    if attribute is None or attribute.current() is not entry.replacement:
        entry.state, entry.reason = "left", "other code wrapped it; it only passes through now"
        return
    attribute.raw = _without_disabled(attribute.raw)
    attribute.restore()
    for module in entry.aliases:
        if vars(module).get(attribute.name) is entry.replacement:
            setattr(module, attribute.name, attribute.raw)


Callback = Callable[[ModuleType], None]


class _Notifier(importlib.abc.MetaPathFinder):
    """Finder that delegates to the others and wraps their loader with the callbacks."""

    def __init__(self) -> None:
        self.wanted: dict[str, list[Callback]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.wanted:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self.wanted.pop(fullname))
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """The real loader, followed by the callbacks."""

    def __init__(self, loader: Any, callbacks: list[Callback]) -> None:
        self._loader = loader
        self._callbacks = callbacks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its real loader: inspect and pickle get the source from it.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for callback in self._callbacks:
            callback(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_NOTIFIER = _Notifier()


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` after module `name` has been executed; immediately if it already was."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
        return
    if _NOTIFIER not in sys.meta_path:
        sys.meta_path.insert(0, _NOTIFIER)
    _NOTIFIER.wanted.setdefault(name, []).append(callback)


def forget() -> None:
    """Drop all pending callbacks and remove the finder."""
    _NOTIFIER.wanted.clear()
    if _NOTIFIER in sys.meta_path:
        sys.meta_path.remove(_NOTIFIER)
