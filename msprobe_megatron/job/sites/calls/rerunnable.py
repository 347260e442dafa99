"""Site: API calls that a probe may run again, or run otherwise.

Where the L1 site tells of a call, this one hands the call over: the handler runs it and gives back its result. The
mode that sees calls is on only while a chosen module itself is running, not in its children unless they are chosen too,
so that a step with few chosen modules costs little more than their hooks. What `autograd.Function`s call in their
backward is seen through hooks on their nodes, which insert nothing into the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from msprobe_megatron.clock import Clock, Moment, inside_backward
from msprobe_megatron.sites import mode_stack
from msprobe_megatron.sites.api_names import Names, name_of
from msprobe_megatron.sites.compiled_regions import CompiledRegions
from msprobe_megatron.sites.wrappers import put_on, take_off
from msprobe_megatron.topology import names

OUTSIDE = "outside"
Fault = Callable[[BaseException, str], None]


class Pass(NamedTuple):
    """A module that is running: its name and chunk, phase and moment, and how often each API was called so far.

    ``shape`` is that of its first input: what is computed from it often has the same, and then lies over ranks alike.
    """

    module: str
    chunk: int
    phase: str
    moment: Moment
    counts: dict[str, int]
    shape: tuple[int, ...] | None = None


class Handler(Protocol):
    """Who is handed the calls."""

    def wants(self, module: str, phase: str, moment: Moment) -> bool:
        """Whether calls that this module makes itself are to be handed over."""

    def call(
        self, api: str, number: int, where: Pass, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run the call and return its result."""


class _Frame(NamedTuple):
    running: Pass | None
    switched: bool
    """Whether entering changed the mode, so that leaving must change it back."""


class _Thread(threading.local):
    """What one thread of the host is running. Modules that several threads run are not inside of each other."""

    def __init__(self) -> None:
        self.stack: list[_Frame] = []
        self.round = 0


class CallSite:
    """Hands over calls between `install` and `remove`.

    Example::

        site = CallSite(chunks, clock, fault, handler)
        site.install({"decoder.layers.0.mlp"}); ...; site.remove()
    """

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
        self._clock, self._fault, self._handler, self._preset = clock, fault, handler, preset
        self._in_backward = in_backward
        self._modules: dict[str, tuple[int, nn.Module]] = {}
        self._children: dict[str, list[str]] = {}
        self._roots: list[str] = []
        self._chosen: frozenset[str] | None = None
        for index, chunk in enumerate(chunks):
            entries = list(names.modules(chunk))
            by_id = {id(entry.module): entry.name for entry in entries}
            for entry in entries:
                self._modules[entry.name] = (index, entry.module)
                if entry.parent is None:
                    self._roots.append(entry.name)
                elif (holder := by_id.get(id(entry.parent))) is not None:
                    self._children.setdefault(holder, []).append(entry.name)
        self._mode = _Mode(self)
        self._regions = CompiledRegions(self._mode, fault)
        self._handles: list[Any] = []
        self._here = _Thread()
        self._passes: dict[tuple[str, str, Moment], dict[str, int]] = {}
        self._installed = False
        self._everywhere = False
        self._round = 0
        self.active = False

    @property
    def module_names(self) -> list[str]:
        """Canonical names of all modules, in the order of definition."""
        return list(self._modules)

    def install(self, chosen: Collection[str] | None = None) -> None:
        """Begin: with the calls of the chosen modules, or with all, those outside of modules included."""
        self.remove()
        self.active = True
        self._round += 1
        self._here.round = self._round
        self._here.stack.clear()
        self._passes.clear()
        self._everywhere = chosen is None or OUTSIDE in chosen
        self._chosen = None if chosen is None else frozenset(chosen)
        if chosen is None:
            watched = set(self._modules)
        else:
            # Besides the chosen ones those at which their own calls, or those outside of modules, end.
            watched = {name for name in chosen if name in self._modules}
            watched.update(child for name in list(watched) for child in self._children.get(name, ()))
            if self._everywhere:
                watched.update(self._roots)
        for name in watched:
            chunk, module = self._modules[name]
            self._handles.append(module.register_forward_pre_hook(self._enter(name, chunk)))
            self._handles.append(module.register_forward_hook(self._leave))
        if not self._installed:
            self._installed = True
            self._regions.install()
            if self._everywhere:
                mode_stack.push(self._mode)
        if self._in_backward:
            put_on(torch.autograd.Function, "apply", self._noting)

    def remove(self) -> None:
        """See no more calls. Safe to call twice.

        Inside a call the mode is not on the stack, and inside backward the stack is a copy: it then sees nothing any
        more, is still kept out of compiled code, and goes when this is called again.
        """
        if not (self.active or self._installed or self._handles):
            return
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        take_off(torch.autograd.Function, "apply", self._noting)
        if self._installed and not inside_backward():
            was_on = mode_stack.take_out(self._mode)
            if was_on or not (self._everywhere or self._stack):
                self._installed = False
                self._regions.remove()

    @property
    def _stack(self) -> list[_Frame]:
        """What this thread is running of this round; what it left unfinished in an earlier one is forgotten."""
        here = self._here
        if here.round != self._round:
            here.round = self._round
            here.stack.clear()
            mode_stack.take_out(self._mode)
        return here.stack

    def restart(self) -> None:
        """A new forward begins: whatever an exception left unfinished is forgotten."""
        if self._stack:
            self._stack.clear()
            on = mode_stack.take_out(self._mode)
            if on and self._everywhere:
                mode_stack.push(self._mode)

    def _enter(self, name: str, chunk: int) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if not self.active or (self._clock.away and self._clock.apart()):
                return
            try:
                phase, moment = self._clock.calling()
                own = self._chosen is None or name in self._chosen
                wanted = own and self._handler.wants(name, phase, moment)
                shape = getattr(args[0], "shape", None) if args else None
                self._push(self._pass(name, chunk, phase, moment, shape) if wanted else None)
            except Exception as error:
                self._fault(error, f"call of {name}")

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.active or (self._clock.away and self._clock.apart()):
            return
        try:
            self._pop()
        except Exception as error:
            self._fault(error, "return of a module")

    def _push(self, running: Pass | None) -> None:
        stack, on = self._stack, mode_stack.holds(self._mode)
        if running is not None and not on:
            mode_stack.push(self._mode)
        elif running is None and on:
            mode_stack.take_out(self._mode)
        stack.append(_Frame(running, (running is not None) != on))

    def _pop(self) -> None:
        stack = self._stack
        if not stack:
            return
        running, switched = stack.pop()
        if switched and running is not None:
            mode_stack.take_out(self._mode)
        elif switched:
            mode_stack.push(self._mode)

    def _pass(self, name: str, chunk: int, phase: str, moment: Moment, shape: Any = None) -> Pass:
        return Pass(name, chunk, phase, moment, self._passes.setdefault((name, phase, moment), {}), shape)

    def running(self) -> Pass | None:
        """The pass in which a call is made now; None if it is not to be handed over."""
        if not self.active:
            return None
        stack = self._stack
        if stack:
            return stack[-1].running
        phase, moment = self._clock.calling()
        if phase != "forward" or not self._handler.wants(OUTSIDE, phase, moment):
            return None
        return self._pass(OUTSIDE, moment.chunk, phase, moment)

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`Function.apply` that sees to it that the mode is on in the backward of chosen modules' functions."""

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(cls, *args, **kwargs)
            stack = self._stack
            running = stack[-1].running if stack else None
            if running is None or not self.active or "Checkpoint" in cls.__name__:
                return result
            try:
                with torch._C.DisableTorchFunction():
                    first = result[0] if isinstance(result, tuple) and result else result
                    node = first.grad_fn if isinstance(first, torch.Tensor) else None
                    if node is not None and "Backward" in type(node).__name__:
                        self._follow(node, running)
            except Exception as error:
                self._fault(error, f"result of {cls.__name__}")
            return result

        return apply

    def _follow(self, node: Any, running: Pass) -> None:
        this_round = self._round

        def before(grad_outputs: Any) -> None:
            if self.active and self._round == this_round:
                self._clock.backward_moment = running.moment
                self._push(self._pass(running.module, running.chunk, "backward", running.moment, running.shape))

        def after(grad_inputs: Any, grad_outputs: Any) -> None:
            if self.active and self._round == this_round:
                self._pop()

        node.register_prehook(before)
        node.register_hook(after)


class _Mode(TorchFunctionMode):
    """Hands calls to the site. While it handles one it is off, so that what a call does inside is not seen."""

    def __init__(self, site: CallSite) -> None:
        super().__init__()
        self._site = site
        self._names = Names(lambda function: name_of(function, site._preset))

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
