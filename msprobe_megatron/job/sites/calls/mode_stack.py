"""torch's stack of function modes: the few private functions of torch that the L1 site needs, in one place."""

from __future__ import annotations

from typing import Any

from torch import overrides
from torch.overrides import TorchFunctionMode

_stack: Any = overrides


def push(mode: TorchFunctionMode) -> None:
    """Switch a mode on, for this thread and the threads that run its backward."""
    _stack._push_mode(mode)


def any_is_on() -> bool:
    """Whether any mode is on."""
    return _stack._get_current_function_mode() is not None


def is_on(mode: TorchFunctionMode) -> bool:
    """Whether this mode is the one that sees calls first."""
    return _stack._get_current_function_mode() is mode


def holds(mode: TorchFunctionMode) -> bool:
    """Whether this mode is on, however many others stand above it."""
    return any(other is mode for other in _stack._get_current_function_mode_stack())


def take_out(mode: TorchFunctionMode) -> bool:
    """Switch a mode off, wherever others that were entered or left meanwhile have put it; whether it was on.

    Example::

        push(mode)
        take_out(mode)
    """
    above = []
    while (top := _stack._get_current_function_mode()) is not None and top is not mode:
        above.append(_stack._pop_mode())
    if top is mode:
        _stack._pop_mode()
    for other in reversed(above):
        _stack._push_mode(other)
    return top is mode
