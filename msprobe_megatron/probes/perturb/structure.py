"""Calls whose constants differ from those of the same call in the other layers: a wrong constant on one layer.

Layers of one model run the same code, so the numbers that are written in it are the same in every layer. A call at the
same place of the same module that is given another constant in one layer than in nearly all others is odd. Needs no
second run.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from typing import Any, NamedTuple

from msprobe_megatron.topology.layers import layer_of

_LAYER = re.compile(r"(^|\.)layers\.\d+")
_FEWEST = 3


class Odd(NamedTuple):
    """A call, the constants it is given, and those that the other layers give."""

    name: str
    api: str
    constants: tuple[float, ...]
    others: tuple[float, ...]
    layers: int


class Structure:
    """Collects the constants of one step's calls.

    Example::

        structure = Structure()
        structure.saw("decoder.layers.0.mlp/torch.Tensor.mul.0", "torch.Tensor.mul", (x, 0.5), {})
        structure.odd()      # []
    """

    def __init__(self) -> None:
        self._calls: dict[str, dict[str, tuple[str, tuple[float, ...]]]] = defaultdict(dict)

    def saw(self, name: str, api: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a call; the first of its name counts."""
        if layer_of(name.partition("/")[0]) is None:
            return
        place = _LAYER.sub(r"\1layers.*", name, count=1)
        constants = tuple(float(v) for v in (*args, *kwargs.values()) if type(v) is float)
        self._calls[place].setdefault(name, (api, constants))

    def odd(self) -> list[Odd]:
        """Calls that stand against all others of their place; nothing where layers differ among themselves."""
        found = []
        for calls in self._calls.values():
            counts = Counter(constants for _, constants in calls.values())
            usual, votes = counts.most_common(1)[0]
            # Rates that grow with depth, or scales by layer number, differ in every layer.
            if votes < _FEWEST or votes < math.ceil(len(calls) * 2 / 3):
                continue
            found += [
                Odd(name, api, constants, usual, votes)
                for name, (api, constants) in calls.items()
                if constants != usual and len(constants) == len(usual)
            ]
        return found
