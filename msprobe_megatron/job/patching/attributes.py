"""Replacing a function where it is stored, and restoring it exactly: the one primitive behind every patch.

`Attribute` finds the stored value in `vars()` along the MRO. `getattr` on a class would bind it first: an inherited
static method would come back as a plain function and an inherited class method as one that is bound to the class it
was read from, so that calling the replacement on an instance passes one argument too many.

`add_wrapper` and `remove_wrapper` are for functions that several callers wrap in any order. A caller that kept the
function it found and put that back would restore the wrapper of another one that has been removed meanwhile; here
the chain is rebuilt from the wrappers that are still installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_ABSENT = object()


class PatchError(Exception):
    """A function cannot be replaced: it does not exist where it was expected, or it is not a function."""


class Attribute:
    """A function, static method or class method of a module, a class or an instance.

    `raw` is the value as it is stored and `own` whether `owner` stores it itself or inherits it. `function` is what a
    replacement calls: unbound for a class, bound for an instance. Raises `PatchError` if there is no such attribute,
    or if it is no function (a property, say).
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self._on_instance = not isinstance(owner, ModuleType | type)
        if not hasattr(owner, "__dict__"):
            raise PatchError(f"{_label(owner)} has no __dict__: its {name} cannot be replaced")
        self.own = name in vars(owner)
        self.raw = vars(owner)[name] if self.own else self._inherited()
        if self.raw is _ABSENT:
            raise PatchError(f"{_label(owner)} has no {name}")
        if not (callable(self.raw) or isinstance(self.raw, classmethod)):
            raise PatchError(
                f"{_label(owner)}.{name} is a {type(self.raw).__name__};"
                " accepted: a function, a static method or a class method"
            )
        # Read now: later the instance stores the replacement.
        bound = self._on_instance and not self.own
        self.function: Any = getattr(owner, name) if bound else unwrapped(self.raw)

    def _inherited(self) -> Any:
        if isinstance(self.owner, ModuleType):
            return getattr(self.owner, self.name, _ABSENT)  # a module's own __getattr__
        for base in (type(self.owner) if self._on_instance else self.owner).__mro__:
            if self.name in vars(base):
                return vars(base)[self.name]
        # An instance that forwards to another one, as proxies of optimizers do.
        return getattr(self.owner, self.name, _ABSENT) if self._on_instance else _ABSENT

    def of_same_kind(self, function: Any) -> Any:
        """`function` as it has to be stored: in a class, static and class methods stay what they are."""
        if isinstance(self.owner, type) and isinstance(self.raw, staticmethod | classmethod):
            return type(self.raw)(function)
        return function

    def current(self) -> Any:
        """What `owner` itself stores now; None if it inherits."""
        return vars(self.owner).get(self.name)

    def store(self, value: Any) -> None:
        """Store `value`, which comes from `of_same_kind`."""
        if self._on_instance:
            object.__setattr__(self.owner, self.name, value)  # a __setattr__ of its own may forward or refuse
        else:
            setattr(self.owner, self.name, value)

    def restore(self) -> None:
        """Store the original again; an inherited one is inherited again."""
        if self.own:
            self.store(self.raw)
        elif self._on_instance:
            object.__delattr__(self.owner, self.name)
        else:
            delattr(self.owner, self.name)


def unwrapped(raw: Any) -> Any:
    """The function inside a static or class method."""
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def leads_to(current: Any, ours: Callable[[Any], bool]) -> bool:
    """Whether `ours` holds for a function that `current` calls, as far as `functools.wraps` shows."""
    while current is not None:
        if ours(current):
            return True
        if isinstance(current, staticmethod | classmethod):
            current = current.__func__
        else:
            current = getattr(current, "__wrapped__", None)
    return False


def _label(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return owner.__qualname__ if isinstance(owner, type) else f"an instance of {type(owner).__qualname__}"


@dataclass
class _Chain:
    attribute: Attribute
    wrappers: list[Wrapper] = field(default_factory=list)
    stored: Any = None

    def rebuild(self) -> None:
        """Store the original with all wrappers around it; without wrappers, restore it."""
        if not self.wrappers:
            self.attribute.restore()
            return
        function = self.attribute.function
        for wrapper in self.wrappers:
            function = wrapper(function)
        self.stored = self.attribute.of_same_kind(function)
        self.attribute.store(self.stored)

    def intact(self) -> bool:
        """Whether the owner still stores this chain, and not something that other code put there."""
        return self.attribute.current() is self.stored

    def called(self) -> bool:
        """Whether a call gets here, be it through a wrapper of other code."""
        return leads_to(self.attribute.current(), lambda found: found is self.stored)


_CHAINS: dict[tuple[int, str], _Chain] = {}


def add_wrapper(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Wrap the function `owner.name`, around the wrappers that are installed already. Idempotent.

    `wrapper(function)` returns the replacement. Raises `PatchError` as `Attribute` does.
    """
    key = (id(owner), name)
    chain = _CHAINS.get(key)
    if chain is not None and wrapper in chain.wrappers and chain.called():
        return
    if chain is None or not chain.intact():  # what other code has put there is the new original
        chain = _CHAINS[key] = _Chain(Attribute(owner, name))
    if wrapper not in chain.wrappers:
        chain.wrappers.append(wrapper)
        chain.rebuild()


def remove_wrapper(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Remove `wrapper`; with the last one the original object is back. Idempotent.

    Where other code has replaced the function since, its replacement stays, and below it the chain as it was:
    taking it out would undo what the other code did.
    """
    chain = _CHAINS.get((id(owner), name))
    if chain is None or wrapper not in chain.wrappers or not chain.intact():
        return
    chain.wrappers.remove(wrapper)
    chain.rebuild()
    if not chain.wrappers:
        del _CHAINS[id(owner), name]
