"""Facts of a training job as strict JSON: no NaN tokens, and no object that makes a run directory unwritable.

Megatron's arguments hold dtypes, paths, functions and infinities; whatever JSON has no word for becomes text.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from enum import Enum
from typing import Any

_DEEPEST = 64


def json_text(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as ASCII JSON; "nan", "inf" and "-inf" are text, unknown objects their ``str``.

    Example::

        json_text({"lr": float("inf"), "path": Path("a"), 3: {1}})   # '{"lr": "inf", "path": "a", "3": [1]}'
    """
    return json.dumps(_plain(value, _DEEPEST), indent=indent, allow_nan=False)


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, (Mapping, set, frozenset, list, tuple)):
        if depth == 0:
            return "..."
        if isinstance(value, Mapping):
            return {str(key): _plain(item, depth - 1) for key, item in value.items()}
        items = [_plain(item, depth - 1) for item in value]
        return sorted(items, key=str) if isinstance(value, (set, frozenset)) else items
    return _leaf(value)


def _leaf(value: Any) -> Any:
    # Exact types first: members of an enumeration may be str or int and say more by their own text.
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Enum) or not isinstance(value, (numbers.Integral, float)):
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return int(value)
