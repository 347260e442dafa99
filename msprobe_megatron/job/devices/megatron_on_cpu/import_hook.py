"""Repairs Megatron modules in the moment after their own code has run and before anyone binds their names.
What is repaired stands in `megatron_fixes`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from msprobe_megatron.job.devices.megatron_on_cpu import fake_triton, megatron_fixes

Fix = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Delegates to the other finders and adds the fix to the loader of a Megatron module."""

    def __init__(self, fixes: dict[str, Fix]) -> None:
        self._fixes = fixes
        # A finder after this one that delegates to all others calls this one again.
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("megatron.") or getattr(self._asking, "name", None) == fullname:
            return None
        self._asking.name = fullname
        try:
            spec = self._ask_those_behind(fullname, path, target)
        finally:
            self._asking.name = None
        if spec is not None and spec.loader is not None:
            _extend(spec.loader, self._fixes.get(fullname), fake_triton.needed_by(spec.origin))
        return spec

    def _ask_those_behind(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Delegate to the finders after this one: those before it have been called, or are calling it now."""
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


def _extend(loader: Loader, fix: Fix | None, triton: bool) -> None:
    """Override `exec_module` on this loader only: it keeps its type, which importlib and inspect check."""
    if fix is None and not triton:
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        with fake_triton.present() if triton else contextlib.nullcontext():
            execute(module)
        if fix is not None:
            fix(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def installed() -> bool:
    """Tell whether `install` has run in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Put the finder in front."""
    sys.meta_path.insert(0, _Finder(megatron_fixes.FIXES))
