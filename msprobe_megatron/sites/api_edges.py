"""Where in the autograd graph the gradients of a call's inputs come by.

A call makes some nodes; an input hangs on one of them, often on the last (the node of the output), sometimes behind
others (`F.linear` transposes its weight first). Here they are found by walking the nodes that the call itself made,
told by their sequence numbers. Nothing is inserted: the site sets hooks on nodes that are there anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from msprobe_megatron.sites.arguments import Found

_MOST_NODES = 256
Sources = list[tuple[str, torch.Tensor, Any, int]]
_autograd: Any = getattr(torch._C, "_autograd", None)
now = getattr(_autograd, "_get_sequence_nr", lambda: -1)
"""The sequence number that the next node of this thread will get; -1 where torch does not tell."""


def sources_of(inputs: Found) -> Sources:
    """The inputs that a gradient may come for, with the node each hangs on; before the call, which may change it.

    Example::

        sources_of([("0", x), ("1", weight)])
    """
    return [(path, x, x.grad_fn, x.output_nr) for path, x in inputs if x.requires_grad]


def links(roots: Iterable[Any], sources: Sources, since: int) -> dict[Any, list[tuple[int, str]]]:
    """Nodes of the call, each with the gradients it hands on (by index) and the paths of the inputs they belong to.

    `since` is what `now()` was before the call: older nodes belong to others. An input that the call uses twice
    stands there twice.

    Example::

        links([y.grad_fn], sources, since)      # {<TBackward0>: [(0, "1")], <MmBackward0>: [(0, "0")]}
    """
    inner = {(node, number): path for path, _, node, number in sources if node is not None}
    leaves = {id(x): path for path, x, node, _ in sources if node is None}
    found: dict[Any, list[tuple[int, str]]] = {}
    waiting = list(roots)
    seen = set(waiting)
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        for index, (target, slot) in enumerate(node.next_functions):
            if target is None:
                continue
            path = inner.get((target, slot))
            if path is None and leaves and _accumulates(target):
                path = leaves.get(id(target.variable))
            if path is not None:
                found.setdefault(node, []).append((index, path))
            elif since >= 0 and target not in seen and _made_since(target, since):
                seen.add(target)
                waiting.append(target)
    return found


def _accumulates(node: Any) -> bool:
    """Whether this is the node of a leaf; others may have a `variable` too, which their authors gave them."""
    return type(node).__name__ == "AccumulateGrad" and hasattr(node, "variable")


def _made_since(node: Any, since: int) -> bool:
    number = getattr(node, "_sequence_nr", None)
    # The accumulator of a leaf has the largest number of all and leads nowhere.
    return number is not None and number() >= since and not _accumulates(node)


class Shares:
    """The gradient of an input that a call uses several times: the sum of what comes by each way.

    Example::

        shares = Shares(2)
        shares.add(first)       # None
        shares.add(second)      # first + second
    """

    __slots__ = ("_left", "_total")

    def __init__(self, ways: int) -> None:
        self._left = ways
        self._total: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Take one share (None if nothing came that way); returns the sum with the last of them."""
        self._left -= 1
        if gradient is not None:
            with torch.no_grad():
                self._total = gradient if self._total is None else self._total + gradient
        return self._total if self._left == 0 else None
