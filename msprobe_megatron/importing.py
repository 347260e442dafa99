"""Call something as soon as a module has been imported, whoever imports it.

This is how a patch reaches a function before anybody binds its name, without importing Megatron ourselves.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


class _Notifier(importlib.abc.MetaPathFinder):
    """Finder that finds through the others and lets their loader tell us when it is done."""

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
        # The module keeps its real loader: inspect and pickle ask it for the source.
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
    """Call `callback(module)` after module `name` has been executed; at once if it already was.

    Example::

        when_imported("megatron.training.arguments", lambda module: patches.apply())
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
        return
    if _NOTIFIER not in sys.meta_path:
        sys.meta_path.insert(0, _NOTIFIER)
    _NOTIFIER.wanted.setdefault(name, []).append(callback)


def forget() -> None:
    """Drop all callbacks that have not been called and leave the import system as it was."""
    _NOTIFIER.wanted.clear()
    if _NOTIFIER in sys.meta_path:
        sys.meta_path.remove(_NOTIFIER)
