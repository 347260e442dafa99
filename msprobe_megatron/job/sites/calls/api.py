"""Site: the inputs, outputs and their gradients of API calls (L1).

A torch-function mode sees every call of torch, of tensor methods and of functionals, however its name was imported,
and replaces no function. `autograd.Function`s, which the mode does not see, are met at `Function.apply`; calls made
inside a reported call are not reported again. Gradients come from hooks on the autograd nodes that the call made, which
insert nothing into the graph: an input hangs on one of these nodes, often on the last (the node of the output),
sometimes behind others (`F.linear` transposes its weight first), so they are walked, told apart from older nodes by
their sequence numbers. All of it exists only while a step is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from msprobe_megatron.job.clock import Clock, Moment
from msprobe_megatron.job.patching.attributes import add_wrapper, remove_wrapper
from msprobe_megatron.job.sites.calls.arguments import (
    Found,
    find_tensors,
    is_generator_state,
    numbered_arguments,
    unread_arguments,
    untraced,
)
from msprobe_megatron.job.sites.calls.mode_stack import ModeSwitch
from msprobe_megatron.job.sites.calls.naming import (
    OUTSIDE,
    Fault,
    ModuleFrames,
    Names,
    NumberedCall,
    Running,
    call_stack,
    name_of,
)
from msprobe_megatron.job.sites.compiled.bindings import (
    CompiledCalls,
    Helpers,
    PlainState,
    State,
    backward_is_traced,
    new_calls,
)
from msprobe_megatron.job.sites.sink import Sink

_MOST_NODES = 256
Sources = list[tuple[str, torch.Tensor, Any, int]]
_autograd: Any = getattr(torch._C, "_autograd", None)
next_sequence_number = getattr(_autograd, "_get_sequence_nr", lambda: -1)
"""The sequence number that the next node of this thread will get; -1 where torch does not expose it."""


def sources_of(inputs: Found) -> Sources:
    """The inputs that may get a gradient, each with its node; taken before the call, which may change the node."""
    return [(path, x, x.grad_fn, x.output_nr) for path, x in inputs if x.requires_grad]


def links(roots: Iterable[Any], sources: Sources, since: int) -> dict[Any, list[tuple[int, str]]]:
    """Nodes of the call, each with the gradients it passes on: their index, and the path of the input they belong to.

    `since` is what `next_sequence_number()` was before the call: older nodes belong to others. An input that the
    call uses twice is listed twice.
    """
    inner = {(node, number): path for path, _, node, number in sources if node is not None}
    leaves = {id(x): path for path, x, node, _ in sources if node is None}
    found: dict[Any, list[tuple[int, str]]] = {}
    waiting = list(roots)
    seen = set(waiting)
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        for index, (target, slot) in enumerate(node.next_functions):
            if target is None:
                continue
            path = inner.get((target, slot))
            if path is None and leaves and _accumulates(target):
                path = leaves.get(id(target.variable))
            if path is not None:
                found.setdefault(node, []).append((index, path))
            elif since >= 0 and target not in seen and _made_since(target, since):
                seen.add(target)
                waiting.append(target)
    return found


def _accumulates(node: Any) -> bool:
    """Whether this is the node of a leaf; nodes of custom functions may have a `variable` of their own."""
    return type(node).__name__ == "AccumulateGrad" and hasattr(node, "variable")


def _made_since(node: Any, since: int) -> bool:
    number = getattr(node, "_sequence_nr", None)
    # The accumulator of a leaf has the largest number of all and leads nowhere.
    return number is not None and number() >= since and not _accumulates(node)


class Shares:
    """The gradient of an input that a call uses several times: the sum over all its uses."""

    __slots__ = ("_left", "_total")

    def __init__(self, uses: int) -> None:
        self._left = uses
        self._total: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Add one share (None: no gradient for this use); returns the sum with the last one, else None."""
        self._left -= 1
        if gradient is not None:
            with torch.no_grad():
                self._total = gradient if self._total is None else self._total + gradient
        return self._total if self._left == 0 else None


class ApiSite:
    """Watches API calls between `install` and `remove`."""

    def __init__(
        self, frames: ModuleFrames, sink: Sink, clock: Clock, fault: Fault, preset: str, stacks: bool, first_site: int
    ) -> None:
        self._frames, self._sink, self._clock, self._fault = frames, sink, clock, fault
        self._preset, self._stacks = preset, stacks
        self._first_site = self._next_site = first_site
        self._calls: dict[tuple[str, int, str, int], NumberedCall | None] = {}
        self._sites: list[dict[str, Any]] = []
        self._structure: list[dict[str, Any]] = []
        wants = sink.wants_io
        sides = (
            wants("forward", "input"),
            wants("forward", "output"),
            wants("backward", "input"),
            wants("backward", "output"),
        )
        self._inputs, self._outputs, self._input_gradients, self._output_gradients = sides
        names = Names(self.name_of)
        helpers = Helpers(fault, names, self._call_of, self._unread, Shares, self._hook, _Mode.__torch_function__)
        self._compiled = new_calls(clock, sink.see, frames, helpers, sides)
        self._state: State = self._compiled or PlainState(sink.see)
        self._mode = _Mode(self, names, self._compiled)
        self._switch = ModeSwitch(self._mode, fault)

    @property
    def active(self) -> bool:
        """Whether calls are being reported."""
        return self._state.active

    @property
    def fired(self) -> int:
        """How many calls were reported so far."""
        return self._state.fired

    def install(self) -> None:
        """Start to report the calls of this thread, and of the threads that run its backward."""
        self._state.round += 1
        self.resume()

    def resume(self) -> None:
        """Report calls again, in the same round: gradients of calls reported before are still awaited."""
        state = self._state
        state.inside, state.see, state.traced = 0, self._sink.see, backward_is_traced()
        state.active = True
        add_wrapper(torch.autograd.Function, "apply", self._apply)
        self._frames.mode = self._mode
        self._switch.on()

    def remove(self) -> None:
        """Report no more calls; gradients that still arrive are ignored. Safe to call twice.

        Inside a call and in another thread the mode is not on the stack, and inside backward the stack is a copy: the
        mode then stays installed but inactive, is still kept out of compiled code, and is removed by the next call.
        """
        if self._state.active:
            self._state.active = False
            self._frames.mode = None
            remove_wrapper(torch.autograd.Function, "apply", self._apply)
        self._switch.off()

    def _apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._state.inside or not self._state.active or "Checkpoint" in cls.__name__:
                return original(cls, *args, **kwargs)
            return self.call(f"{cls.__module__}.{cls.__name__}", original, (cls, *args), kwargs)

        return apply

    def call(
        self, api: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], inside: int = 1
    ) -> Any:
        """Run a call and report its inputs and outputs to the sink."""
        state, compiled = self._state, self._compiled
        if compiled is not None and not compiled.traced:
            return compiled.run(api, function, args, kwargs, inside)
        before = None
        try:
            with untraced():
                before = self._before(api, args, kwargs)
        except Exception as error:
            self._fault(error, f"input of {api}")
        state.inside += inside
        try:
            result = function(*args, **kwargs)
        finally:
            state.inside -= inside
        if before is not None and state.active:
            try:
                with untraced():
                    self._after(result, *before)
            except Exception as error:
                self._fault(error, f"output of {api}")
        return result

    def called(self, api: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`call` for a function that is not part of torch; the torch calls that it makes are reported too."""
        if self._state.inside or not self._state.active:
            return function(*args, **kwargs)
        return self.call(api, function, args, kwargs, inside=0)

    def name_of(self, function: Callable[..., Any]) -> str | None:
        """Name of a function's calls; None if they are not reported."""
        try:
            return name_of(function, self._preset)
        except Exception as error:
            self._fault(error, f"name of {function!r}")
            return None

    def _before(
        self, api: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[NumberedCall, Running, Sources, int] | None:
        found = numbered_arguments(args, kwargs)
        if not found or any(is_generator_state(tensor) for _, tensor in found):
            return None
        stack = self._frames.stack
        running = stack[-1] if stack else self._frames.outside(OUTSIDE)
        if running is None:
            return None
        module, chunk, phase, moment, counts = running
        number = counts.get(api, 0)
        counts[api] = number + 1
        call = self._call_of(module, chunk, api, number)
        if call is None:
            return None
        if call.partly_read or "out" in kwargs:
            unread = self._unread(call, args, kwargs)
            found = [(path, x) for path, x in found if path.partition(".")[0] not in unread]
        if self._inputs:
            see, places, microbatch = self._sink.see, call.inputs, moment[0]
            for path, tensor in found:
                see(places[path], tensor, microbatch, phase)
        # Before the call: an in-place operator moves the tensor it changes to a new node.
        gradients = self._input_gradients and torch.is_grad_enabled()
        return call, running, sources_of(found) if gradients else [], next_sequence_number()

    def _call_of(self, module: str, chunk: int, api: str, number: int) -> NumberedCall | None:
        """A numbered call; None if the sink does not want it."""
        key = (module, chunk, api, number)
        if key not in self._calls:
            name = f"{module}/{api}.{number}"
            site = self.new_site(name, api, chunk) if self._sink.wants(name) else None
            self._calls[key] = None if site is None else NumberedCall(name, api, chunk, site)
        return self._calls[key]

    def _unread(self, call: NumberedCall, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[str, ...]:
        """Arguments that a call does not read; sites.json names them, and they have no rows."""
        unread = tuple(path for path, _ in unread_arguments(call.api, args, kwargs or {}))
        if unread:
            self._sites[call.site - self._first_site]["unread"] = list(unread)
        return unread

    def new_site(self, name: str, api: str, chunk: int) -> int:
        """Register a call that is seen for the first time, with its call stack; returns its id in sites.json."""
        site = self._next_site
        self._next_site += 1
        stack = call_stack(2) if self._stacks else []
        self._sites.append({"site": site, "name": name, "vpp": chunk, "class": api, "stack": stack})
        return site

    @property
    def structure(self) -> list[dict[str, Any]]:
        """Id, name and stack of every call, for sites.json; the same object as long as nothing was added."""
        if len(self._structure) != len(self._sites):
            self._structure = list(self._sites)
        return self._structure

    def _after(self, result: Any, call: NumberedCall, running: Running, sources: Sources, since: int) -> None:
        outputs: Found = []
        if result.__class__ is torch.Tensor:
            outputs.append(("", result))
        else:
            find_tensors(result, "", outputs)
        self._state.fired += 1
        if self._outputs:
            see, places, microbatch, phase = self._sink.see, call.outputs, running.moment[0], running.phase
            for path, tensor in outputs:
                see(places[path], tensor, microbatch, phase)
        # Under no_grad (first pass of a checkpoint) results have no node; gradients come with the recomputation.
        self._await_gradients(call, running.moment, sources, since, outputs)

    def _await_gradients(
        self, call: NumberedCall, moment: Moment, sources: Sources, since: int, outputs: Found
    ) -> None:
        arriving: dict[Any, list[Any]] = {}
        for path, tensor in outputs:
            node = tensor.grad_fn
            if node is not None:
                wanted = arriving.setdefault(node, [])
                if self._output_gradients:
                    wanted += (tensor.output_nr, call.output_gradients[path])
        if not arriving:
            return
        leaving: dict[Any, list[Any]] = {}
        if sources:
            found = links(arriving, sources, since)
            places = call.input_gradients
            shares = _shares(found) if sum(map(len, found.values())) > 1 else {}
            for node, edges in found.items():
                leaving[node] = [cell for index, path in edges for cell in (index, places[path], shares.get(path))]
        for node, here in arriving.items():
            there = leaving.pop(node, [])
            if here or there:
                self._hook(node, [moment, len(here), *here, *there])
        for node, there in leaving.items():
            self._hook(node, [moment, 0, *there])

    def _hook(self, node: Any, cells: list[Any]) -> None:
        node.register_hook(_NodeHook((self, self._state.round, *cells)))


def _shares(found: dict[Any, list[tuple[int, str]]]) -> dict[str, Shares]:
    """Accumulators for the inputs that the call uses several times."""
    uses = Counter(path for edges in found.values() for _, path in edges)
    return {path: Shares(count) for path, count in uses.items() if count > 1}


class _NodeHook(tuple[Any, ...]):
    """The hook of a node: reports the gradients of one call that arrive at the node and that leave it.

    A flat tuple instead of several objects: all hooks of a step are alive when its backward begins, and the garbage
    collector visits each object again and again. Items: site, round, moment, number of items for arriving gradients;
    index and place of each arriving gradient; index, place and `Shares` (or None) of each leaving one.
    """

    __slots__ = ()

    def __call__(self, grad_inputs: Any, grad_outputs: Any) -> None:
        site, this_round, moment, count = self[:4]
        if not site._state.active or site._state.round != this_round:
            return
        try:
            site._clock.backward_moment = moment
            see, microbatch = site._sink.see, moment[0]
            with untraced():
                for at in range(4, 4 + count, 2):
                    index = self[at]
                    gradient = grad_outputs[index] if index < len(grad_outputs) else None
                    if gradient is not None:
                        see(self[at + 1], gradient, microbatch, "backward")
                for at in range(4 + count, len(self), 3):
                    index, place, shares = self[at : at + 3]
                    gradient = grad_inputs[index] if index < len(grad_inputs) else None
                    if shares is not None:
                        gradient = shares.add(gradient)
                    if gradient is not None:
                        see(place, gradient, microbatch, "backward")
        except Exception as error:
            site._fault(error, "gradients of an API call")


class _Mode(TorchFunctionMode):
    """Hands calls to the site. It is off while it handles one, so the kit's own work is not seen."""

    def __init__(self, site: ApiSite, names: Names, compiled: CompiledCalls | None) -> None:
        super().__init__()
        self._site, self._names = site, names
        if compiled is not None:
            # Torch looks the method up on the object, so the compiled one shadows that of the class.
            vars(self)["__torch_function__"] = MethodType(compiled, self)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, state = self._names[function], self._site._state
        if name is None or state.inside or not state.active:
            return function(*args, **kwargs) if kwargs else function(*args)
        return self._site.call(name, function, args, kwargs or {})
