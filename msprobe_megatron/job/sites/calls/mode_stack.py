"""torch's stack of function modes: the private functions of torch that the sites of API calls need, in one place.

`CompiledRegions` keeps a mode out of what `torch.compile` runs: a mode that is on makes dynamo compile again with the
mode traced into the graph, which means other kernels and other bits. Dynamo announces through one function of its own
when compiled code begins and ends in a thread; the mode is off exactly in between.

torch has one stack of modes for each thread, and only the thread itself can change it. `ModeSwitch` remembers in which
threads a mode is on, so that a step that one thread of the host begins and another ends leaves nothing behind.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

from msprobe_megatron.job.clock import inside_backward
from msprobe_megatron.job.patching.attributes import add_wrapper, remove_wrapper

_stack: Any = overrides
_EVAL_FRAME = "torch._dynamo.eval_frame"
_SETTERS = ("set_eval_frame", "_maybe_set_eval_frame")  # one function, or one that calls the other


def push(mode: TorchFunctionMode) -> None:
    """Switch a mode on, for this thread and the threads that run its backward."""
    _stack._push_mode(mode)


def is_on(mode: TorchFunctionMode) -> bool:
    """Whether this mode is on top, so that it sees calls first."""
    return _stack._get_current_function_mode() is mode


def holds(mode: TorchFunctionMode) -> bool:
    """Whether this mode is on, at any height of the stack."""
    return any(other is mode for other in _stack._get_current_function_mode_stack())


def take_out(mode: TorchFunctionMode) -> bool:
    """Switch a mode off, also below modes that were entered later; returns whether it was on."""
    above = []
    while (top := _stack._get_current_function_mode()) is not None and top is not mode:
        above.append(_stack._pop_mode())
    if top is mode:
        _stack._pop_mode()
    for other in reversed(above):
        _stack._push_mode(other)
    return top is mode


class CompiledRegions:
    """Switches a mode off in compiled code, between `install` and `remove`."""

    def __init__(self, mode: TorchFunctionMode, fault: Callable[[BaseException, str], None]) -> None:
        self._mode, self._fault = mode, fault
        self._module: Any = None
        self._thread = threading.local()

    def install(self) -> None:
        """Wrap dynamo's announcements, if the job has imported dynamo."""
        module: Any = sys.modules.get(_EVAL_FRAME)
        if module is None:
            return
        self._module = module
        for name in _SETTERS:
            if hasattr(module, name):
                add_wrapper(module, name, self._wrap)

    def remove(self) -> None:
        """Unwrap them. Safe to call twice."""
        for name in _SETTERS if self._module is not None else ():
            remove_wrapper(self._module, name, self._wrap)

    def _wrap(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        mode, thread, fault = self._mode, self._thread, self._fault

        def set_eval_frame(callback: Any) -> Any:
            if callable(callback):
                try:
                    if is_on(mode):
                        take_out(mode)
                        thread.taken = True
                except Exception as error:
                    fault(error, "entry of compiled code")
                return original(callback)
            before = original(callback)
            if getattr(thread, "taken", False):
                thread.taken = False
                push(mode)
            return before

        # Dynamo is still on when this is called and must not compile it as code of the job.
        skip = getattr(torch._C._dynamo.eval_frame, "skip_code", None)
        if skip is not None:
            skip(set_eval_frame.__code__)
        return set_eval_frame


class ModeSwitch:
    """Switches a mode on and off in the calling thread; where it is on, it is kept out of compiled code."""

    def __init__(self, mode: TorchFunctionMode, fault: Callable[[BaseException, str], None]) -> None:
        self._mode, self._regions = mode, CompiledRegions(mode, fault)
        self._here = threading.local()
        self._threads: set[object] = set()

    def on(self) -> None:
        """Switch it on in this thread, and for the backward of what this thread runs. Safe to call twice."""
        if getattr(self._here, "token", None) is None:
            self._here.token = _Token(self._threads, self._released)
            push(self._mode)
        self._regions.install()

    def off(self) -> bool:
        """Switch it off in this thread; returns whether it was on. Safe to call twice.

        Inside a call the mode is not on the stack, and inside backward the stack is a copy: it then stays on until the
        next call of this. In another thread it stays on until that thread ends.
        """
        if inside_backward() or not take_out(self._mode):
            return False
        self._here.token = None
        return True

    def _released(self) -> None:
        if not self._threads:
            self._regions.remove()


class _Token:
    """Stands for one thread in which a mode is on: lives in a variable of that thread, and ends with it."""

    def __init__(self, threads: set[object], released: Callable[[], None]) -> None:
        self._threads, self._released, self._mark = threads, released, object()
        threads.add(self._mark)

    def __del__(self) -> None:
        self._threads.discard(self._mark)
        self._released()
