"""Constants of modules: scales, epsilons, dropout rates, activation functions as built, alike layers together.

Read once when the job attaches, for the law that layers and ranks are built alike. No tensor is looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torch import nn

from msprobe_megatron.topology import names

_NUMBER = re.compile(r"(layers|local_experts)\.(\d+)")
_FUNCTION = "activation_func"
_MOST = 20_000
"""Constants that are looked at: a model with more has them in containers of its own making."""


def module_constants(chunks: Sequence[nn.Module]) -> dict[str, dict[str, list[str]]]:
    """By place and attribute (``decoder.layers.*.mlp.eps``): each value, and where in the model it is.

    Where is the numbers of layer and expert, ``3`` or ``3.1``; ``""`` for what stands in no layer.
    """
    found: dict[str, dict[str, list[str]]] = {}
    looked = 0
    for chunk in chunks:
        for entry in names.modules(chunk):
            place, where = _NUMBER.sub(r"\1.*", entry.name), ".".join(n for _, n in _NUMBER.findall(entry.name))
            for attribute, value in vars(entry.module).items():
                text = _text(attribute, value)
                if text is None:
                    continue
                looked += 1
                if looked > _MOST:
                    return found
                found.setdefault(f"{place}.{attribute}", {}).setdefault(text, []).append(where)
    return found


def _text(attribute: str, value: object) -> str | None:
    """A finite number, or the name of an activation function; None for anything else."""
    if attribute == _FUNCTION:
        name = getattr(value, "__name__", None)
        return name if isinstance(name, str) and name.isidentifier() else None
    if type(value) is not float or attribute.startswith("_") or not math.isfinite(value):
        return None
    return repr(value)
