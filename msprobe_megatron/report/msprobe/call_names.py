"""Names of API calls in msprobe's words: ``Functional.silu.3.forward``, numbered through a step.

Ours are named after the module that makes the call and numbered within one pass of it. The order of rows gives
msprobe's running number; a backward has the number of its forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Key = tuple[Any, Any, str]
# The first that fits; the longest come first.
_PREFIXES = (
    ("torch.nn.functional.", "Functional"),
    ("torch.distributed.", "Distributed"),
    ("torch.Tensor.", "Tensor"),
    ("torch.ops.", "Aten"),
    ("torch.", "Torch"),
)


def is_call(name: str) -> bool:
    """Whether this is the name of a call and not of a module.

    Example::

        >>> is_call("decoder.layers.0.mlp/torch.nn.functional.silu.0")
        True
    """
    return "/" in name


def api_of(op: str) -> str:
    """Prefix and name of an API in msprobe's words; what torch does not have is ``Custom``.

    Example::

        >>> api_of("torch.nn.functional.silu"), api_of("megatron.core.tensor_parallel.mappings._AllToAll")
        ('Functional.silu', 'Custom._AllToAll')
    """
    for start, prefix in _PREFIXES:
        if op.startswith(start):
            return f"{prefix}.{op[len(start) :].rpartition('.')[2]}"
    return f"Custom.{op.rpartition('.')[2]}"


def key_of(row: Mapping[str, Any]) -> Key:
    """Which call a row belongs to."""
    return row["vpp"], row["microbatch"], row["name"]


def numbers_of(rows: Iterable[Mapping[str, Any]]) -> dict[Key, int]:
    """The running number of every call, from rows in the order of execution."""
    found: dict[Key, int] = {}
    counts: Counter[str] = Counter()
    for row in rows:
        if is_call(row["name"]) and row["kind"] != "gradient" and key_of(row) not in found:
            api = api_of(row["op"])
            found[key_of(row)] = counts[api]
            counts[api] += 1
    return found


def put_at(values: list[Any], path: str, record: dict[str, Any]) -> None:
    """Place a record in the nested lists of an argument list; a word in the path ends up behind the last one."""
    here = values
    *above, last = (path or "0").split(".")
    for part in above:
        here = _at(here, part, [])
    _at(here, last, record)


def _at(values: list[Any], part: str, wanted: Any) -> Any:
    index = int(part) if part.isdigit() and int(part) < 1 << 16 else len(values)
    values.extend([None] * (index + 1 - len(values)))
    if values[index] is None or not isinstance(wanted, list):
        values[index] = wanted
    return values[index] if isinstance(values[index], list) else values
