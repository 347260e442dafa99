"""Wrappers around one function of torch that several sites put on and take off, in any order.

A site that kept the function it found and put it back would bring back the wrapper of another site that has left
meanwhile, and the chain would grow with every step. Here the chain is made anew of the wrappers that are on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class _Place:
    owner: Any
    name: str
    original: Any
    wraps: list[Wrap] = field(default_factory=list)

    def bind(self) -> None:
        """Set the original, with all wrappers around it."""
        method = isinstance(self.original, classmethod)
        function = self.original.__func__ if method else self.original
        for wrap in self.wraps:
            function = wrap(function)
        setattr(
            self.owner, self.name, self.original if not self.wraps else classmethod(function) if method else function
        )


_PLACES: dict[tuple[int, str], _Place] = {}


def put_on(owner: Any, name: str, wrap: Wrap) -> None:
    """Lay `wrap` around the function or class method `owner.name`, over those that are on already.

    Example::

        put_on(torch.autograd.Function, "apply", self._noting)
        ...
        take_off(torch.autograd.Function, "apply", self._noting)
    """
    place = _PLACES.setdefault((id(owner), name), _Place(owner, name, vars(owner)[name]))
    place.wraps.append(wrap)
    place.bind()


def take_off(owner: Any, name: str, wrap: Wrap) -> None:
    """Take `wrap` away; with the last one the function is again the very object that it was. Safe to call twice."""
    place = _PLACES.get((id(owner), name))
    if place is None or wrap not in place.wraps:
        return
    place.wraps.remove(wrap)
    place.bind()
    if not place.wraps:
        del _PLACES[id(owner), name]
