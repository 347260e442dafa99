"""Running a call once more without leaving a trace: no gradient, no hook, no random number, no mode that sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from msprobe_megatron.probes.perturb.safety import CannotRun, Guard, Refused, refusal, refusal_of_call

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_cuda: Any = torch.cuda
_FUNCTION: Any = torch.autograd.Function
_APPLY = _FUNCTION.__dict__["apply"]
# Kinds of calls that have run under the guard in this process without a refusal; true whoever asks.
_PROVEN: set[Any] = set()
_MOST_KINDS = 1 << 14
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)


class Rerunner:
    """Repeats calls, and knows which not to.

    Example::

        again = Rerunner()
        if again.refusal(torch.softmax, "torch.softmax", {}) is None:
            second = again.run(torch.softmax, (x, -1), {})
    """

    def __init__(self) -> None:
        self._refused: dict[Any, str | None] = {}
        self._watched = _PROVEN
        self.refusals: Counter[str] = Counter()

    def refusal(self, function: Callable[..., Any], api: str, kwargs: dict[str, Any]) -> str | None:
        """Why this call is not run twice, or None; counted."""
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
        """The result of the call, computed again; raises `Refused` if it turns out to be one not to repeat.

        ``watch`` keeps the guard on however often the call was seen: for code that is not torch's own.
        """
        key = None if watch else (function, tuple(map(_kind, args)), tuple((k, _kind(v)) for k, v in kwargs.items()))
        if key in self._watched:
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
            if len(self._watched) >= _MOST_KINDS:
                self._watched.clear()
            self._watched.add(key)
        return result

    def prove(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let a call run under the guard once for each kind of arguments, before it is repeated in another way."""
        key = (function, tuple(map(_kind, args)), tuple((k, _kind(v)) for k, v in kwargs.items()))
        if key not in self._watched:
            with torch.no_grad():
                self.run(function, args, kwargs)

    def forbid(self, function: Callable[..., Any], reason: str) -> None:
        """Never again."""
        self._refused[function] = reason
        self.refusals[reason] += 1


def random_states() -> list[torch.Tensor]:
    """States of the random generators of this process: of the host, and of the device it computes on."""
    states = [torch.get_rng_state()]
    if _cuda.is_available() and _cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def restore_states(before: list[torch.Tensor]) -> bool:
    """Put the states back if something has drawn; whether it has."""
    if all(torch.equal(a, b) for a, b in zip(before, random_states(), strict=True)):
        return False
    torch.set_rng_state(before[0])
    if len(before) > 1:
        torch.cuda.set_rng_state(before[1])
    return True


@contextmanager
def hooks_off(module: nn.Module) -> Iterator[None]:
    """While a module runs again: no hook of anybody's is told of it, and no site that watches `Function.apply`."""
    kept = [(part, name, getattr(part, name)) for part in module.modules() for name in _HOOKS if getattr(part, name)]
    for part, name, hooks in kept:
        setattr(part, name, type(hooks)())
    apply, _FUNCTION.apply = _FUNCTION.__dict__["apply"], _APPLY
    try:
        yield
    finally:
        _FUNCTION.apply = apply
        for part, name, hooks in kept:
            setattr(part, name, hooks)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.dim())
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    return type(value)
