"""How a fault is planted in a forked rank: before the model is built, or when chunks and optimizer exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.jobs.compare.faults import Chunks


def nothing(*args: Any) -> None:
    return None


@dataclass(frozen=True)
class Fault:
    before: Callable[[], None] = nothing
    ready: Callable[[Chunks, Any], None] = nothing


def rank_on(axis: str) -> int:
    """Coordinate of this rank."""
    from msprobe_megatron.topology import coordinates

    return coordinates.current().of(axis)


def wrap(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function or method: `change(original, *args, **kwargs)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    setattr(owner, name, changed)
