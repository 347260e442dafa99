"""Which calls are never run twice: collectives, random and mutating operators, and what waits for the device.

Told in three ways, each enough by itself. By name: collectives and the like. By schema: torch says of its own operators
which of their arguments they write to and which draw random numbers. And by watching: the first repetition of every
kind of call, and every repetition of code that is not torch's own, runs under a guard that sees each operator
before it runs and refuses there, so that nothing has happened when it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch

_Mode: Any = _python_dispatch.TorchDispatchMode
_weak_reference: Any = StorageWeakRef
_COLLECTIVE = re.compile(
    r"distributed|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast$|barrier|(^|\.)i?(send|recv)$"
    r"|_parallel_region|p2p"
)
_RANDOM = re.compile(r"dropout|(^|_)rand|bernoulli|multinomial|(^|_)normal_?$|poisson|gumbel|rrelu|exponential")
_MUTATING = frozenset({"__setitem__", "copy_", "requires_grad_", "set_", "resize_", "backward"})
# They change nothing and give back what they were given, or nothing that can be compared.
_IDLE = frozenset({"embedding", "one_hot", "argmax", "argmin", "argsort", "eq", "ne", "lt", "le", "gt", "ge", "any"})
_IN_PLACE = re.compile(r"__i[a-z]+__|(?<!_)_$")
_SEEDED = getattr(torch.Tag, "nondeterministic_seeded", None)
# Schemas as the dispatcher has them; asking `torch.ops` instead takes milliseconds for each operator.
_schemas: Any = torch._C._jit_get_schemas_for_operator
_overload: Any = torch._C._get_operation_overload
_WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal")


class Refused(Exception):
    """A call that must not be repeated; the text says why."""


class CannotRun(Exception):
    """A changed call raised (no such dtype, no such device): nothing can be said of it."""


def refusal(function: Callable[..., Any], api: str) -> str | None:
    """Why a function is never run twice, from its name and schema; None if they say nothing against it.

    Example::

        >>> refusal(torch.Tensor.add_, "torch.Tensor.add_")
        'mutates'
    """
    short = getattr(function, "__name__", "")
    bare = short.strip("_")
    if _COLLECTIVE.search(api):
        return "collective"
    if short in _MUTATING or _IN_PLACE.search(short):
        return "mutates"
    if _RANDOM.search(bare):
        return "random"
    if bare in _IDLE:
        return "nothing to compare"
    return _by_schema(bare)


def refusal_of_call(kwargs: dict[str, Any]) -> str | None:
    """Why this one call is not run twice, from its keywords.

    Example::

        >>> refusal_of_call({"inplace": True})
        'mutates'
    """
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        return "mutates"
    if kwargs.get("dropout_p"):
        return "random"
    return None


def _by_schema(bare: str) -> str | None:
    schemas = [schema for schema in _schemas(f"aten::{bare}") if not any(a.is_out for a in schema.arguments)]
    if schemas and all(_SEEDED in _overload(schema.name, schema.overload_name)[2] for schema in schemas):
        return "random"
    return "mutates" if schemas and all(schema.is_mutable for schema in schemas) else None


def _draws(op: Any) -> bool:
    return _SEEDED is not None and _SEEDED in op.tags


class Guard(_Mode):  # type: ignore[misc]
    """Refuses, before it runs, what must not run twice; memory that was made under the guard may be written to.

    Example::

        with Guard():
            torch.nn.functional.dropout(x)      # raises Refused
    """

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[int, Any] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Look at one operator."""
        kwargs = kwargs or {}
        name = op._schema.name
        if op.namespace == "c10d" or op.namespace.startswith("_c10d") or _COLLECTIVE.search(name):
            raise Refused("collective")
        if name in _WAITS and not all(tensor.is_cpu for tensor in _tensors(args)):
            raise Refused("reads a number back")
        if _draws(op) and not _without_dropout(op, args, kwargs):
            raise Refused("random")
        if op._schema.is_mutable:
            self._check_writes(op, args, kwargs)
        result = op(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own and not _aliases(tensor, args):
                # The memory is given back when its tensor is, but as long as the reference is held no other storage
                # gets the same number.
                self._own[storage._cdata] = _weak_reference(storage)
        return result

    def _check_writes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for index, argument in enumerate(op._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if any(tensor.untyped_storage()._cdata not in self._own for tensor in _tensors(value)):
                raise Refused("mutates")


def _without_dropout(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Fused attention is marked as random because it may drop; told not to, it is not."""
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            return not value
    return False


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _aliases(tensor: torch.Tensor, args: Any) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == storage for other in _tensors(args))
