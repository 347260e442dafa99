"""Calls into the megatron.core that is installed, whose argument names come and go between releases."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


def known(target: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Those of `values` that `target` (a function, class or dataclass) takes.

    Example::

        >>> known(lambda a, b=0: None, a=1, c=2)
        {'a': 1}
    """
    if dataclasses.is_dataclass(target):
        names = {field.name for field in dataclasses.fields(target)}
    else:
        names = set(inspect.signature(target).parameters)
    return {name: value for name, value in values.items() if name in names}
