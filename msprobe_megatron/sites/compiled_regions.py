"""Keeps the mode that sees API calls out of what `torch.compile` runs.

A mode that is on makes dynamo compile anew, with the mode traced into the graph: other kernels, other bits. Dynamo says
through one function of its own when compiled code begins and ends in a thread; the mode is off exactly in between.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from msprobe_megatron.sites import mode_stack
from msprobe_megatron.sites.wrappers import put_on, take_off

_EVAL_FRAME = "torch._dynamo.eval_frame"
_SETTERS = ("set_eval_frame", "_maybe_set_eval_frame")  # one function, or one that calls the other


class CompiledRegions:
    """Switches a mode off in compiled code, between `install` and `remove`.

    Example::

        regions = CompiledRegions(mode, fault)
        regions.install(); ...; regions.remove()
    """

    def __init__(self, mode: TorchFunctionMode, fault: Callable[[BaseException, str], None]) -> None:
        self._mode, self._fault = mode, fault
        self._module: Any = None
        self._thread = threading.local()

    def install(self) -> None:
        """Listen to dynamo, if the job has imported it."""
        module: Any = sys.modules.get(_EVAL_FRAME)
        if module is None:
            return
        self._module = module
        for name in _SETTERS:
            if hasattr(module, name):
                put_on(module, name, self._listening)

    def remove(self) -> None:
        """Leave dynamo as it was."""
        for name in _SETTERS if self._module is not None else ():
            take_off(self._module, name, self._listening)

    def _listening(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        mode, thread, fault = self._mode, self._thread, self._fault

        def set_eval_frame(callback: Any) -> Any:
            if callable(callback):
                try:
                    if mode_stack.is_on(mode):
                        mode_stack.take_out(mode)
                        thread.taken = True
                except Exception as error:
                    fault(error, "entry of compiled code")
                return original(callback)
            before = original(callback)
            if getattr(thread, "taken", False):
                thread.taken = False
                mode_stack.push(mode)
            return before

        # It is called with dynamo still on, which must not take it for code of the job.
        skip = getattr(torch._C._dynamo.eval_frame, "skip_code", None)
        if skip is not None:
            skip(set_eval_frame.__code__)
        return set_eval_frame
