"""Which module is running: the context that gives API calls names that do not depend on the layout.

Forward hooks push and pop; they exist only while a step is recorded. A call is numbered within one pass (phase and
microbatch) of the module it is made in, so that a number means the same call in every layout. `loss.backward()` is
itself a call during which the mode that sees calls is off: a module that is repeated inside switches it on for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.overrides import TorchFunctionMode

from msprobe_megatron.clock import Clock, Moment
from msprobe_megatron.sites import mode_stack
from msprobe_megatron.sites.module_hooks import ModuleHooks
from msprobe_megatron.topology import names


class Running(NamedTuple):
    """A module in its pass: its name and chunk, phase and moment, and how often each API was called so far."""

    name: str
    chunk: int
    phase: str
    moment: Moment
    counts: dict[str, int]


class _Thread(threading.local):
    """What one thread of the host is running. Modules that several threads run are not inside of each other."""

    def __init__(self) -> None:
        self.stack: list[Running] = []
        self.round = 0
        # The modes that were switched on here, with the heights of the stack at which they were.
        self.entered: list[tuple[int, TorchFunctionMode]] = []


class ModuleFrames:
    """The stacks of running modules of all chunks, one a thread.

    Example::

        frames = ModuleFrames(chunks, clock, fault)
        frames.install(); ...; frames.stack[-1]; frames.remove()
    """

    def __init__(self, chunks: Sequence[nn.Module], clock: Clock, fault: Callable[[BaseException, str], None]) -> None:
        self._clock, self._fault = clock, fault
        self._active = self._hooked = False
        # Left also when the forward raises: what is called after that is not of this module any more.
        self._hooks = [
            ModuleHooks(entry.module, self._enter(entry.name, index), self._leave, always=True)
            for index, chunk in enumerate(chunks)
            for entry in names.modules(chunk)
        ]
        self._passes: dict[tuple[str, str, Moment], dict[str, int]] = {}
        self.here = _Thread()
        self._round = 0
        self.mode: TorchFunctionMode | None = None

    @property
    def stack(self) -> list[Running]:
        """The modules that this thread is running, the innermost last."""
        return self.here.stack

    def install(self) -> None:
        """Set the hooks; called at the beginning of a recorded step."""
        self._forget()
        self._round += 1
        self._passes.clear()
        self._active = self._hooked = True
        for hooks in self._hooks:
            hooks.set()

    def pause(self) -> None:
        """Leave the hooks in place and follow nothing; the numbers of calls go on afterwards."""
        self._active = False

    def resume(self) -> None:
        """Follow again."""
        self._active = True

    def remove(self) -> None:
        """Take the hooks away."""
        self._active = False
        if self._hooked:
            self._hooked = False
            for hooks in self._hooks:
                hooks.remove()
        self._forget()

    def _forget(self) -> None:
        """Let this thread run none of the modules any more. Others find out when they enter one."""
        here = self.here
        here.stack.clear()
        while here.entered:
            mode_stack.take_out(here.entered.pop()[1])

    def outside(self, name: str) -> Running | None:
        """The context of a call outside of all modules; None inside backward, where nothing is repeated."""
        phase, moment = self._clock.calling()
        return self._pass(name, moment.chunk, phase, moment) if phase == "forward" else None

    def _enter(self, name: str, chunk: int) -> Any:
        # A hook that is taken away while torch walks over the hooks is still called, then without the kwargs.
        def hook(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            if not self._active or (self._clock.away and self._clock.apart()):
                return
            try:
                phase, moment = self._clock.calling()
                here, mode = self.here, self.mode
                if here.round != self._round:
                    self._forget()
                    here.round = self._round
                stack = here.stack
                if not stack and mode is not None and not mode_stack.any_is_on():
                    mode_stack.push(mode)
                    here.entered.append((len(stack), mode))
                stack.append(self._pass(name, chunk, phase, moment))
            except Exception as error:
                self._fault(error, f"call of {name}")

        return hook

    def _leave(self, module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        if not self._active or (self._clock.away and self._clock.apart()):
            return
        try:
            here = self.here
            if here.stack:
                here.stack.pop()
            if here.entered and len(here.stack) == here.entered[-1][0]:
                mode_stack.take_out(here.entered.pop()[1])
        except Exception as error:
            self._fault(error, "return of a module")

    def _pass(self, name: str, chunk: int, phase: str, moment: Moment) -> Running:
        key = (name, phase, moment)
        counts = self._passes.get(key)
        if counts is None:
            counts = self._passes[key] = {}
        return Running(name, chunk, phase, moment, counts)
