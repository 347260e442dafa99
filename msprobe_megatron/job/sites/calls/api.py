"""Site: the inputs, outputs and their gradients of API calls (L1).

A torch-function mode sees every call of torch, of tensor methods and of functionals, however its name was imported,
and replaces no function. `autograd.Function`s, which the mode does not see, are met at `Function.apply`; what they call
inside is not told again. Gradients come from hooks on the autograd node of a call, which insert nothing into the
graph. All of it exists only while a step is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from msprobe_megatron.clock import Clock, Moment, inside_backward
from msprobe_megatron.sites import mode_stack
from msprobe_megatron.sites.api_edges import Shares, Sources, links, now, sources_of
from msprobe_megatron.sites.api_names import Names, name_of
from msprobe_megatron.sites.arguments import Found, find_tensors, own_work
from msprobe_megatron.sites.compiled_calls import CompiledCalls, Helpers, PlainState, State, new_calls
from msprobe_megatron.sites.compiled_hooks import backward_is_traced
from msprobe_megatron.sites.compiled_regions import CompiledRegions
from msprobe_megatron.sites.frames import ModuleFrames, Running
from msprobe_megatron.sites.stacks import call_stack
from msprobe_megatron.sites.wrappers import put_on, take_off
from msprobe_megatron.topology.places import Place
from msprobe_megatron.topology.shards import ShardSpec

OUTSIDE = "outside"
_UNKNOWN_LAYOUT = ShardSpec.unmergeable("API call")
_SCALARS = frozenset({int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device, slice})
_PATHS = tuple(map(str, range(16)))
"""Of arguments by position; a call with more of them is rare."""
Fault = Callable[[BaseException, str], None]


class Sink(Protocol):
    """Who is told of a tensor, and what it wants to know."""

    def wants(self, name: str) -> bool:
        """Whether an API call of this name is to be watched."""

    def wants_io(self, direction: str, io: str) -> bool:
        """Whether inputs or outputs (`io`) of forward or backward (`direction`) are to be watched."""

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Take note of a tensor, now: it may be gone or changed after the call."""


class _Places(dict[str, Place]):
    """The places of a call's tensors of one kind and side by their paths, made when first needed."""

    __slots__ = ("_of",)

    def __init__(self, kind: str, name: str, io: str, op: str, chunk: int, site: int) -> None:
        super().__init__()
        self._of = (kind, name, io, op, chunk, site)

    def __missing__(self, path: str) -> Place:
        kind, name, io, op, chunk, site = self._of
        found = self[path] = Place(kind, name, io, path, op, chunk, site, _unknown, _one)
        return found


class _Call:
    """One numbered call of a module: where its inputs, its outputs and their gradients are told of."""

    __slots__ = ("input_gradients", "inputs", "output_gradients", "outputs")

    def __init__(self, name: str, op: str, chunk: int, site: int) -> None:
        self.inputs, self.outputs, self.input_gradients, self.output_gradients = (
            _Places(kind, name, io, op, chunk, site)
            for kind in ("activation", "gradient")
            for io in ("input", "output")
        )


class ApiSite:
    """Watches API calls between `install` and `remove`.

    Example::

        site = ApiSite(frames, probe, clock, fault, preset="focus")
        site.install(); ...; site.remove()
    """

    def __init__(
        self, frames: ModuleFrames, sink: Sink, clock: Clock, fault: Fault, preset: str, stacks: bool, first_site: int
    ) -> None:
        self._frames, self._sink, self._clock, self._fault = frames, sink, clock, fault
        self._preset, self._stacks, self._next_site = preset, stacks, first_site
        self._calls: dict[tuple[str, int, str, int], _Call | None] = {}
        self._pushed = False
        self._sites: list[dict[str, Any]] = []
        self._structure: list[dict[str, Any]] = []
        wants = sink.wants_io
        sides = (
            *(wants("forward", "input"), wants("forward", "output")),
            *(wants("backward", "input"), wants("backward", "output")),
        )
        self._inputs, self._outputs, self._input_gradients, self._output_gradients = sides
        names = Names(self.name_of)
        helpers = Helpers(fault, names, self._call_of, self._hook, _Mode.__torch_function__)
        self._compiled = new_calls(clock, sink.see, frames, OUTSIDE, helpers, sides)
        self._state: State = self._compiled or PlainState(sink.see)
        self._mode = _Mode(self, names, self._compiled)
        self._regions = CompiledRegions(self._mode, fault)

    @property
    def active(self) -> bool:
        """Whether calls are told of now."""
        return self._state.active

    @property
    def fired(self) -> int:
        """How many calls were told of so far."""
        return self._state.fired

    def install(self) -> None:
        """Begin to see calls; of this thread, and of the threads that run its backward."""
        self._state.round += 1
        self.resume()

    def resume(self) -> None:
        """See calls again, of the same round: gradients of the calls seen before are still awaited."""
        state = self._state
        state.inside, state.see, state.traced = 0, self._sink.see, backward_is_traced()
        state.active = True
        put_on(torch.autograd.Function, "apply", self._apply)
        self._frames.mode = self._mode
        if not self._pushed:
            self._pushed = True
            mode_stack.push(self._mode)
            self._regions.install()

    def remove(self) -> None:
        """See no more calls; gradients that still arrive are ignored. Safe to call twice.

        Inside a call and in another thread the mode is not on the stack, and inside backward the stack is a copy: it
        then sees nothing any more, is still kept out of compiled code, and goes when this is called again.
        """
        if self._state.active:
            self._state.active = False
            self._frames.mode = None
            take_off(torch.autograd.Function, "apply", self._apply)
        if self._pushed and not inside_backward() and mode_stack.take_out(self._mode):
            self._pushed = False
            self._regions.remove()

    def _apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._state.inside or not self._state.active or "Checkpoint" in cls.__name__:
                return original(cls, *args, **kwargs)
            return self.call(f"{cls.__module__}.{cls.__name__}", original, (cls, *args), kwargs)

        return apply

    def call(
        self, api: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], inside: int = 1
    ) -> Any:
        """Run a call and tell the sink of what went in and came out."""
        state, compiled = self._state, self._compiled
        if compiled is not None and not compiled.traced:
            return compiled.run(api, function, args, kwargs, inside)
        before = None
        try:
            with own_work():
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
                with own_work():
                    self._after(result, *before)
            except Exception as error:
                self._fault(error, f"output of {api}")
        return result

    def called(self, api: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same for a function that is no API of torch and calls some: they are told too."""
        if self._state.inside or not self._state.active:
            return function(*args, **kwargs)
        return self.call(api, function, args, kwargs, inside=0)

    def name_of(self, function: Callable[..., Any]) -> str | None:
        """What a call of this function is named; None for those that are not watched."""
        try:
            return name_of(function, self._preset)
        except Exception as error:
            self._fault(error, f"name of {function!r}")
            return None

    def _before(
        self, api: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Call, Running, Sources, int] | None:
        found: Found = []
        for path, value in zip(_PATHS, args, strict=False):
            kind = value.__class__
            if kind is torch.Tensor or kind is nn.Parameter:
                found.append((path, value))
            elif kind not in _SCALARS:
                find_tensors(value, path, found, parameters=True)
        if kwargs or len(args) > len(_PATHS):
            for index, value in enumerate(args[len(_PATHS) :], len(_PATHS)):
                find_tensors(value, str(index), found, parameters=True)
            for name, value in kwargs.items():
                if value.__class__ not in _SCALARS:
                    find_tensors(value, name, found, parameters=True)
        if not found:
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
        if self._inputs:
            see, places, microbatch = self._sink.see, call.inputs, moment[0]
            for path, tensor in found:
                see(places[path], tensor, microbatch, phase)
        # Before the call: in place, it moves what it changes to a node of its own.
        gradients = self._input_gradients and torch.is_grad_enabled()
        return call, running, sources_of(found) if gradients else [], now()

    def _call_of(self, module: str, chunk: int, api: str, number: int) -> _Call | None:
        """A numbered call; None for those that nobody wants."""
        key = (module, chunk, api, number)
        if key not in self._calls:
            name = f"{module}/{api}.{number}"
            site = self.new_site(name, api, chunk) if self._sink.wants(name) else None
            self._calls[key] = None if site is None else _Call(name, api, chunk, site)
        return self._calls[key]

    def new_site(self, name: str, api: str, chunk: int) -> int:
        """Number of a call that is seen for the first time, with the stack that leads to it."""
        site = self._next_site
        self._next_site += 1
        stack = call_stack(2) if self._stacks else []
        self._sites.append({"site": site, "name": name, "vpp": chunk, "class": api, "stack": stack})
        return site

    @property
    def structure(self) -> list[dict[str, Any]]:
        """Id, name and stack of every call, for sites.json; the same object while nothing is new."""
        if len(self._structure) != len(self._sites):
            self._structure = list(self._sites)
        return self._structure

    def _after(self, result: Any, call: _Call, running: Running, sources: Sources, since: int) -> None:
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
        # Under no_grad (the first pass of a checkpoint) no result has a node: its gradients come when it is repeated.
        self._watch_gradients(call, running.moment, sources, since, outputs)

    def _watch_gradients(self, call: _Call, moment: Moment, sources: Sources, since: int, outputs: Found) -> None:
        given: dict[Any, list[Any]] = {}
        for path, tensor in outputs:
            node = tensor.grad_fn
            if node is not None:
                wanted = given.setdefault(node, [])
                if self._output_gradients:
                    wanted += (tensor.output_nr, call.output_gradients[path])
        if not given:
            return
        asked: dict[Any, list[Any]] = {}
        if sources:
            found = links(given, sources, since)
            places = call.input_gradients
            shares = _shares(found) if sum(map(len, found.values())) > 1 else {}
            for node, edges in found.items():
                asked[node] = [cell for index, path in edges for cell in (index, places[path], shares.get(path))]
        for node, here in given.items():
            there = asked.pop(node, [])
            if here or there:
                self._hook(node, [moment, len(here), *here, *there])
        for node, there in asked.items():
            self._hook(node, [moment, 0, *there])

    def _hook(self, node: Any, cells: list[Any]) -> None:
        node.register_hook(_Arrived((self, self._state.round, *cells)))


def _shares(found: dict[Any, list[tuple[int, str]]]) -> dict[str, Shares]:
    """Of the inputs whose gradients come by several ways."""
    ways = Counter(path for edges in found.values() for _, path in edges)
    return {path: Shares(count) for path, count in ways.items() if count > 1}


class _Arrived(tuple[Any, ...]):
    """The hook of a node: tells of the gradients that come to it and go from it for one call.

    One object and not six: all of a step are alive when its backward begins, and the garbage collector visits each of
    them again and again. Its cells are site, round, moment and how many cells those that come have; then for each
    of these its index and place; then for each that goes its index, place and share, if it is one.
    """

    __slots__ = ()

    def __call__(self, grad_inputs: Any, grad_outputs: Any) -> None:
        site, this_round, moment, count = self[:4]
        if not site._state.active or site._state.round != this_round:
            return
        try:
            site._clock.backward_moment = moment
            see, microbatch = site._sink.see, moment[0]
            with own_work():
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
    """Hands calls to the site. While it handles one it is off, so that its own work is not seen."""

    def __init__(self, site: ApiSite, names: Names, compiled: CompiledCalls | None) -> None:
        super().__init__()
        self._site, self._names = site, names
        if compiled is not None:
            # Torch asks the object for its method: the compiled one hides that of the class.
            vars(self)["__torch_function__"] = MethodType(compiled, self)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, state = self._names[function], self._site._state
        if name is None or state.inside or not state.active:
            return function(*args, **kwargs) if kwargs else function(*args)
        return self._site.call(name, function, args, kwargs or {})


def _unknown(shape: tuple[int, ...]) -> ShardSpec:
    return _UNKNOWN_LAYOUT


def _one(axis: str) -> int:
    return 1
