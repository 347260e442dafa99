"""Calls an operation of `amp_C` on lists of tensors."""

from collections.abc import Callable
from typing import Any


def multi_tensor_applier(operation: Callable[..., Any], overflow: Any, lists: Any, *args: Any) -> Any:
    """In one go; Apex does it in chunks."""
    return operation(overflow, lists, *args)
