"""A small patch manager that behaves as those of MindSpeed and ModelLink do, as far as other patches can tell.

Patches are registered first and applied later. One whose name ends in ``wrapper`` or ``decorator`` is stacked on the
target, any other replaces it; names bound elsewhere to the very same object are swept; what is applied is built
from the *first* original each time, so that applying again throws away what others bound in between.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


class _Registered:
    def __init__(self, target: str) -> None:
        self.module_name, _, self.name = target.rpartition(".")
        self.first: Any = None
        self.replacement: Callable[..., Any] | None = None
        self.wrappers: list[Callable[..., Any]] = []

    def apply(self) -> None:
        module = importlib.import_module(self.module_name)
        current = getattr(module, self.name)
        self.first = self.first or current
        final = self.replacement or self.first
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(module, self.name, final)
        for other in list(sys.modules.values()):
            if getattr(other, "__dict__", {}).get(self.name) is current:
                setattr(other, self.name, final)


class StandInManager:
    """Registers and applies; the interface that the tests share with MindSpeed's own manager."""

    def __init__(self) -> None:
        self._patches: dict[str, _Registered] = {}

    def register_patch(self, target: str, new: Callable[..., Any], force_patch: bool = False) -> None:
        patch = self._patches.setdefault(target, _Registered(target))
        if new.__name__.endswith(("wrapper", "decorator")):
            patch.wrappers.append(new)
        elif patch.replacement is not None and not force_patch:
            raise RuntimeError(f"{target} is replaced already")
        else:
            patch.replacement = new

    def apply_patches(self) -> None:
        for patch in self._patches.values():
            patch.apply()
