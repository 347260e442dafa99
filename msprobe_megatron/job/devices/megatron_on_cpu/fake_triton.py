"""A stand-in for triton while a Megatron module that only decorates with it is being imported. Nothing of it
can be launched; it is gone from sys.modules afterwards, so that no one else believes triton is there.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

_NAMES = ("triton", "triton.language", "triton.language.extra", "triton.runtime", "triton.runtime.jit")
_UNGUARDED = re.compile(rb"^(?:import|from)\s+triton\b", re.MULTILINE)


class _Anything:
    """A decorator, dtype, constexpr annotation or base class, whatever it is used as."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if decorates else _Anything()

    def __getitem__(self, key: Any) -> Any:
        return _Anything()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()


class _Module(types.ModuleType):
    __version__ = "3.0.0"
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


def needed_by(path: str | None) -> bool:
    """Whether the source at `path` imports triton outside any `try:` and triton is not installed."""
    if path is None or not path.endswith(".py") or importlib.util.find_spec("triton") is not None:
        return False
    try:
        with open(path, "rb") as source:
            return _UNGUARDED.search(source.read()) is not None
    except OSError:
        return False


@contextlib.contextmanager
def present() -> Iterator[None]:
    """Keep the stand-in in sys.modules for the length of a `with` block.

    Example:
        >>> with present():
        ...     import triton

    """
    before = {name: sys.modules.get(name) for name in _NAMES}
    for name in _NAMES:
        module = _Module(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module_before
