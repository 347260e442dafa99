"""Running a call once more without side effects, and the calls that are never run twice.

A second run leaves no trace: no gradient, no hook, no random number, no mode that sees it. Never run twice are
collectives, random and mutating operators, and what synchronizes with the device. There are three filters, each
sufficient by itself. By name: collectives and the like. By schema: torch declares which arguments its operators write
to and which operators draw random numbers. By observation: the first repetition of every kind of call, and every
repetition of code that is not torch's own, runs under a guard that sees each operator before it runs and refuses it
there, so nothing has happened when it does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
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
# Results that are copies of inputs, or that cannot be compared.
_IDLE = frozenset({"embedding", "one_hot", "argmax", "argmin", "argsort", "eq", "ne", "lt", "le", "gt", "ge", "any"})
_IN_PLACE = re.compile(r"__i[a-z]+__|(?<!_)_$")
_SEEDED = getattr(torch.Tag, "nondeterministic_seeded", None)
# Schemas of the dispatcher; a look-up in `torch.ops` takes milliseconds per operator.
_schemas: Any = torch._C._jit_get_schemas_for_operator
_overload: Any = torch._C._get_operation_overload
_WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal")


class Refused(Exception):
    """A call that must not be repeated; the text says why."""


class CannotRun(Exception):
    """The changed call raised (unsupported dtype or device): it cannot be judged."""


def refusal(function: Callable[..., Any], api: str) -> str | None:
    """Why a function is never run twice, from its name and schema; None if there is no reason.

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
    """Why a single call is not run twice, from its keyword arguments.

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
    """Refuses operators that must not run twice, before they run; memory allocated under the guard may be written."""

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[int, Any] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Check one operator and run it."""
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
                # A weak reference does not keep the memory, but no other storage gets the same id while it is held.
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
    """Fused attention is tagged as random because of dropout; with a dropout of 0 it is not."""
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


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FUNCTION: Any = torch.autograd.Function
_APPLY = _FUNCTION.__dict__["apply"]
# Kinds of calls that have run under the guard in this process without a refusal; shared by all instances.
_PROVEN: set[Any] = set()
_MOST_KINDS = 1 << 14
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)


class Rerunner:
    """Repeats calls, except those that must not be."""

    def __init__(self) -> None:
        self._refused: dict[Any, str | None] = {}
        self._proven = _PROVEN
        self.refusals: Counter[str] = Counter()

    def refusal(self, function: Callable[..., Any], api: str, kwargs: dict[str, Any]) -> str | None:
        """Why a call is not run twice, or None; refusals are counted."""
        try:
            reason = self._refused[function]
        except KeyError:
            reason = self._refused[function] = refusal(function, api)
        reason = reason or (refusal_of_call(kwargs) if kwargs else None)
        if reason is not None:
            self.refusals[reason] += 1
        return reason

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, watch: bool = False
    ) -> Any:
        """The result of the call, computed again; raises `Refused` if the guard refuses it, `CannotRun` if it raises.

        ``watch`` keeps the guard on, also for kinds of calls that are proven: for code that is not torch's own.
        """
        key = None if watch else (function, tuple(map(_kind, args)), tuple((k, _kind(v)) for k, v in kwargs.items()))
        if key in self._proven:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                raise CannotRun(f"{type(error).__name__}: {str(error)[:160]}") from error
        before = random_states()
        try:
            with Guard():
                result = function(*args, **kwargs)
        except Refused as refused:
            self.forbid(function, str(refused))
            raise
        except Exception as error:
            raise CannotRun(f"{type(error).__name__}: {str(error)[:160]}") from error
        if restore_states(before):
            self.forbid(function, "random")
            raise Refused("random")
        if key is not None:
            if len(self._proven) >= _MOST_KINDS:
                self._proven.clear()
            self._proven.add(key)
        return result

    def prove(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a call under the guard once per kind of arguments, before it is repeated in another way."""
        key = (function, tuple(map(_kind, args)), tuple((k, _kind(v)) for k, v in kwargs.items()))
        if key not in self._proven:
            with torch.no_grad():
                self.run(function, args, kwargs)

    def forbid(self, function: Callable[..., Any], reason: str) -> None:
        """Never run this function twice from now on."""
        self._refused[function] = reason
        self.refusals[reason] += 1


def random_states() -> list[torch.Tensor]:
    """States of the random generators of the host and of the current device."""
    states = [torch.get_rng_state()]
    module = _device_module()
    if module is not None:
        states.append(module.get_rng_state())
    return states


def restore_states(before: list[torch.Tensor]) -> bool:
    """Restore the states if random numbers were drawn; returns whether they were."""
    if all(torch.equal(a, b) for a, b in zip(before, random_states(), strict=True)):
        return False
    torch.set_rng_state(before[0])
    module = _device_module()
    if len(before) > 1 and module is not None:
        module.set_rng_state(before[1])
    return True


def _device_module() -> Any | None:
    """`torch.npu`, `torch.cuda` or None: the NPU first, because transfer_to_npu makes torch.cuda answer for it."""
    for module in (getattr(torch, "npu", None), torch.cuda):
        if module is not None and module.is_available() and module.is_initialized():
            return module
    return None


@contextmanager
def hooks_off(module: nn.Module) -> Iterator[None]:
    """Context in which a module runs without any hooks, and `Function.apply` without wrappers."""
    kept = [(part, name, getattr(part, name)) for part in module.modules() for name in _HOOKS if getattr(part, name)]
    for part, name, hooks in kept:
        setattr(part, name, type(hooks)())
    # A site may have wrapped functions of the module itself, such as `routing`: a repeated run is not of the step.
    wrapped = [(part, name, found) for part in module.modules() for name, found in _wrapped(part)]
    for part, name, found in wrapped:
        vars(part)[name] = found.__wrapped__
    apply, _FUNCTION.apply = _FUNCTION.__dict__["apply"], _APPLY
    try:
        yield
    finally:
        _FUNCTION.apply = apply
        for part, name, hooks in kept:
            setattr(part, name, hooks)
        for part, name, found in wrapped:
            vars(part)[name] = found


def _wrapped(part: nn.Module) -> list[tuple[str, Any]]:
    """Functions that a site has wrapped to observe them; not those that the training code has replaced."""
    return [(name, found) for name, found in vars(part).items() if getattr(found, "observes", False)]


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.dim())
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    return type(value)
