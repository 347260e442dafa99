"""Site: API calls that a feature may run again, or replace.

Where the L1 site reports a call, this one hands the call over: the handler runs it and returns its result. The mode
that sees calls is on only while a chosen module itself is running, not in its children unless they are chosen too, so a
step with few chosen modules costs little more than their hooks. What `autograd.Function`s call in their backward is
seen through hooks on their nodes, which insert nothing into the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from msprobe_megatron.job.clock import Clock, Moment, inside_backward
from msprobe_megatron.job.patching.attributes import add_wrapper, remove_wrapper
from msprobe_megatron.job.sites.calls.mode_stack import CompiledRegions, ModeSwitch
from msprobe_megatron.job.sites.calls.naming import OUTSIDE, Fault, ModuleFrames, Names, Running, name_of
from msprobe_megatron.topology import names


class Pass(NamedTuple):
    """A module in one pass: `Running`, and the shape of its first input.

    What is computed from that input often has the same shape, and then the same layout over ranks.
    """

    module: str
    chunk: int
    phase: str
    moment: Moment
    counts: dict[str, int]
    shape: tuple[int, ...] | None = None


class Handler(Protocol):
    """Receives the calls."""

    def wants(self, module: str, phase: str, moment: Moment) -> bool:
        """Whether calls that this module makes itself are to be handed over."""

    def call(
        self, api: str, number: int, where: Pass, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run the call and return its result."""


class CallSite:
    """Hands over calls between `install` and `remove`."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        clock: Clock,
        fault: Fault,
        handler: Handler,
        preset: str = "focus",
        *,
        in_backward: bool = False,
    ) -> None:
        self._clock, self._fault, self._handler = clock, fault, handler
        self._in_backward = in_backward
        self._children: dict[str, list[str]] = {}
        self._roots: list[str] = []
        for chunk in chunks:
            entries = list(names.modules(chunk))
            by_id = {id(entry.module): entry.name for entry in entries}
            for entry in entries:
                if entry.parent is None:
                    self._roots.append(entry.name)
                elif (holder := by_id.get(id(entry.parent))) is not None:
                    self._children.setdefault(holder, []).append(entry.name)
        self._mode = _Mode(self, preset)
        self._regions, self._switch = CompiledRegions(self._mode, fault), ModeSwitch(self._mode, fault)
        self._frames = ModuleFrames(chunks, clock, fault, self._follow_module)
        self._frames.mode = self._mode
        self._chosen: frozenset[str] | None = None
        self._everywhere = False
        self._round = 0
        self.active = False

    def install(self, chosen: Collection[str] | None = None) -> None:
        """Start with the calls of the chosen modules, or with all calls, those outside of modules included."""
        self.remove()
        self._round += 1
        self._everywhere = chosen is None or OUTSIDE in chosen
        self._chosen = None if chosen is None else frozenset(chosen)
        watched: set[str] | None = None
        if chosen is not None:
            # Besides the chosen modules those that end their own calls, or the calls outside of modules.
            watched = {*chosen, *(child for name in chosen for child in self._children.get(name, ()))}
            if self._everywhere:
                watched.update(self._roots)
        self._frames.install(watched)
        self.active = True
        if self._everywhere:
            self._switch.on()
        else:
            self._regions.install()
        if self._in_backward:
            add_wrapper(torch.autograd.Function, "apply", self._wrap_apply)

    def pause(self) -> None:
        """Hand over nothing, and leave the hooks in place."""
        self.active = False
        self._frames.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self.active = True
        self._frames.resume()

    def remove(self) -> None:
        """Hand over no more calls. Safe to call twice.

        Inside a call the mode is not on the stack, and inside backward the stack is a copy: the mode then stays
        installed but inactive, is still kept out of compiled code, and is removed by the next call of this.
        """
        self.active = False
        if self._switch.off() or not (inside_backward() or self._frames.stack):
            self._regions.remove()
        self._frames.remove()
        remove_wrapper(torch.autograd.Function, "apply", self._wrap_apply)

    def restart(self) -> None:
        """A new forward begins: forget what an exception left unfinished."""
        if self._frames.stack:
            self._frames.forget()

    def _follow_module(self, running: Running, args: tuple[Any, ...]) -> Pass | None:
        chosen = self._chosen is None or running.name in self._chosen
        if not (chosen and self._handler.wants(running.name, running.phase, running.moment)):
            return None
        return Pass(*running, getattr(args[0], "shape", None) if args else None)

    def running(self) -> Pass | None:
        """The pass in which a call is made now; None if it is not to be handed over."""
        if not self.active:
            return None
        stack = self._frames.stack
        if stack:
            innermost: Pass | None = stack[-1]
            return innermost
        running = self._frames.outside(OUTSIDE)
        if running is None or not self._handler.wants(OUTSIDE, running.phase, running.moment):
            return None
        return Pass(*running)

    def _wrap_apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`Function.apply` that switches the mode on for the backward of functions that chosen modules apply."""

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(cls, *args, **kwargs)
            stack = self._frames.stack
            running = stack[-1] if stack else None
            if running is None or not self.active or "Checkpoint" in cls.__name__:
                return result
            try:
                with torch._C.DisableTorchFunction():
                    first = result[0] if isinstance(result, tuple) and result else result
                    node = first.grad_fn if isinstance(first, torch.Tensor) else None
                    if node is not None and "Backward" in type(node).__name__:
                        self._follow_backward(node, running)
            except Exception as error:
                self._fault(error, f"result of {cls.__name__}")
            return result

        return apply

    def _follow_backward(self, node: Any, running: Pass) -> None:
        this_round = self._round

        def before(grad_outputs: Any) -> None:
            if self.active and self._round == this_round:
                try:
                    self._clock.backward_moment = running.moment
                    backward = self._frames.running(running.module, running.chunk, "backward", running.moment)
                    self._frames.push(Pass(*backward, running.shape))
                except Exception as error:
                    self._fault(error, f"backward in {running.module}")

        def after(grad_inputs: Any, grad_outputs: Any) -> None:
            if self.active and self._round == this_round:
                try:
                    self._frames.pop()
                except Exception as error:
                    self._fault(error, f"backward in {running.module}")

        node.register_prehook(before)
        node.register_hook(after)


class _Mode(TorchFunctionMode):
    """Hands calls to the site. It is off while it handles one, so calls made inside are not seen."""

    def __init__(self, site: CallSite, preset: str) -> None:
        super().__init__()
        self._site = site
        self._names = Names(lambda function: name_of(function, preset))

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            name = self._names[function]
            running = self._site.running() if name is not None and self._site.active else None
        except Exception as error:
            self._site._fault(error, "which call")
            name = running = None
        if name is None or running is None:
            return function(*args, **kwargs) if kwargs else function(*args)
        number = running.counts.get(name, 0)
        running.counts[name] = number + 1
        return self._site._handler.call(name, number, running, function, args, kwargs or {})
