"""Site: the inputs, outputs and their gradients of every module (L0).

Forward hooks see values; gradients come from tensor hooks that they set. Module backward hooks are never used: they
insert autograd nodes, which changes bits and breaks Megatron's pipeline. All hooks exist only while a step is
being recorded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from msprobe_megatron.job.clock import Clock, Moment
from msprobe_megatron.job.sites.calls.arguments import Found, named_arguments, results, untraced
from msprobe_megatron.job.sites.calls.naming import call_stack
from msprobe_megatron.job.sites.compiled.bindings import Watch, backward_is_traced, new_hook, new_watch
from msprobe_megatron.job.sites.module.hooks import ModuleHooks, See, await_gradient
from msprobe_megatron.job.sites.sink import Sink
from msprobe_megatron.topology import names
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.shards import Place, ShardSpec
from msprobe_megatron.topology.shards_of.activations import (
    ChunkLayout,
    activation_spec,
    at_stage_boundary,
    calls_before,
)

_CALL = re.compile(r"call(\d+)(?:\.|$)")
# They return their input unchanged; their rows would only repeat those of their neighbours.
_NO_OPERATION = ("IdentityOp", "IdentityFuncOp", "Identity")

Fault = Callable[[BaseException, str], None]


class _Places(NamedTuple):
    """The two rows a tensor of a module can have; ``absent``: it exists only because of the pipeline split."""

    activation: Place
    gradient: Place
    absent: bool
    see_value: bool
    see_gradient: bool


class _Watched:
    """One watched module: its places, made when first needed."""

    __slots__ = ("calls", "chunk", "current", "entered", "entry", "hooks", "layout", "parameters", "places", "site")

    def __init__(self, entry: names.NamedModule, chunk: int, layout: ChunkLayout, site: int) -> None:
        self.entry, self.chunk, self.layout, self.site = entry, chunk, layout, site
        self.places: dict[tuple[str, str], _Places] = {}
        self.parameters = parameter_names(entry.module)
        self.calls: dict[tuple[str, Moment], int] = {}
        self.entered: set[tuple[str, Moment]] = set()
        self.hooks: ModuleHooks | None = None
        self.current: tuple[str, Moment, int] = ("forward", Moment(0, 0), 0)


class ModuleSite:
    """Watches the modules of all chunks that the sink wants."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        sink: Sink,
        clock: Clock,
        where: Coordinates,
        fault: Fault,
        stacks: bool = True,
        biases: bool = True,
    ) -> None:
        """`biases`: a parameter among the results of a module, the bias it leaves to its caller, is an output too."""
        self._sink, self._clock, self._where, self._fault = sink, clock, where, fault
        self._stacks, self._biases = stacks, biases
        self._active = self._hooked = False
        self._round = 0
        self._see_gradient = self._gradient()
        self._watch: Watch | None = None
        self.stacks: dict[int, list[str]] = {}
        self._structure: list[dict[str, Any]] = []
        self._structured = 0
        self.watched: list[_Watched] = []
        for index, chunk in enumerate(chunks):
            layout = ChunkLayout.of(chunk)
            for entry in names.modules(chunk):
                if type(entry.module).__name__ not in _NO_OPERATION and sink.wants(entry.name):
                    self.watched.append(_Watched(entry, index, layout, len(self.watched)))
        self._forward_in = sink.wants_io("forward", "input")
        self._forward_out = sink.wants_io("forward", "output")
        self._backward_in = sink.wants_io("backward", "input")
        self._backward_out = sink.wants_io("backward", "output")
        if self.watched:
            sides = (self._forward_in, self._forward_out, self._backward_in, self._backward_out)
            self._watch = new_watch(clock, sink.see, fault, self._gradient_fault, stacks, sides, biases)

    def install(self) -> None:
        """Set the hooks, or reuse those that are still set; called at the beginning of a recorded step."""
        self._round += 1
        self._see_gradient = self._gradient()
        if self._watch is not None:
            self._watch.round, self._watch.traced = self._round, backward_is_traced()
            self._watch.see, self._watch.see_gradient = self._sink.see, self._see_gradient
        self._switch(True)
        for watched in self.watched:
            watched.calls.clear()
            watched.entered.clear()
        if self._hooked:
            return
        self._hooked = True
        for watched in self.watched:
            if watched.hooks is None:
                watched.hooks = ModuleHooks(watched.entry.module, *self._hooks(watched))
            watched.hooks.set()

    def pause(self) -> None:
        """Ignore what the hooks see, and leave them in place."""
        self._switch(False)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._switch(True)

    def remove(self) -> None:
        """Remove all hooks; gradients that still arrive are ignored."""
        self._switch(False)
        self._hooked = False
        for watched in self.watched:
            if watched.hooks is not None:
                watched.hooks.remove()

    def _switch(self, on: bool) -> None:
        self._active = on
        if self._watch is not None:
            self._watch.active = on

    def structure(self) -> list[dict[str, Any]]:
        """Id, name, class and stack of every watched module, for sites.json; the same object until one is added."""
        if len(self._structure) != len(self.watched) or self._structured != len(self.stacks):
            self._structured = len(self.stacks)
            self._structure = [
                {
                    "site": watched.site,
                    "name": watched.entry.name,
                    "vpp": watched.chunk,
                    "class": type(watched.entry.module).__name__,
                    "stack": self.stacks.get(watched.site, []),
                }
                for watched in self.watched
            ]
        return self._structure

    def _hooks(self, watched: _Watched) -> tuple[Callable[..., None], Callable[..., None]]:
        """The two hooks of a module: compiled if possible, with the Python ones as fallback."""
        before, after = self._before(watched), self._after(watched)
        if self._watch is None:
            return before, after
        name = watched.entry.name
        make_input, make_output = (partial(self._places, watched, io) for io in ("input", "output"))
        return (
            new_hook(self._watch, watched, before, watched.parameters, make_input, f"input of {name}", after=False),
            new_hook(self._watch, watched, after, (), make_output, f"output of {name}", after=True),
        )

    def _before(self, watched: _Watched) -> Callable[..., None]:
        # A hook that is removed while torch iterates over the hooks is still called, then without the kwargs.
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            if not self._active or kwargs is None or (clock.away and clock.apart()):
                return
            try:
                now = clock.calling()
                calls = watched.calls
                call = calls.get(now, 0)
                calls[now] = call + 1
                watched.current = (now[0], now[1], call)
                if self._stacks and watched.site not in self.stacks:
                    self.stacks[watched.site] = call_stack()
                if inputs:
                    with untraced():
                        self._see(watched, "input", named_arguments(watched.parameters, args, kwargs))
            except Exception as error:
                self._fault(error, f"input of {watched.entry.name}")

        clock, inputs = self._clock, self._forward_in or self._backward_in
        return hook

    def _after(self, watched: _Watched) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> None:
            if not self._active or (clock.away and clock.apart()):
                return
            try:
                with untraced():
                    self._see(watched, "output", results(kwargs_and_output[-1], self._biases))
            except Exception as error:
                self._fault(error, f"output of {watched.entry.name}")

        clock = self._clock
        return hook

    def _see(self, watched: _Watched, io: str, found: Found) -> None:
        if not found:
            return
        phase, moment, call = watched.current
        forward, backward = (
            (self._forward_in, self._backward_in) if io == "input" else (self._forward_out, self._backward_out)
        )
        # Under no_grad (first pass of a checkpoint) the gradient will come through the recomputed tensor.
        grad_enabled = torch.is_grad_enabled()
        known, see, microbatch = watched.places, self._sink.see, moment.microbatch
        for path, tensor in found:
            if call:
                path = f"call{call}.{path}" if path else f"call{call}"  # noqa: PLW2901
            places = known.get((io, path)) or self._places(watched, io, path)
            activation, gradient, absent, see_value, see_gradient = places
            if absent:
                continue
            if forward and see_value:
                see(activation, tensor, microbatch, phase)
            if backward and see_gradient and tensor.requires_grad and tensor.__class__ is not nn.Parameter:
                if io == "input" and (not grad_enabled or tensor.is_leaf):
                    self._at_checkpoint(watched, path, tensor, gradient)
                elif grad_enabled:
                    await_gradient(tensor, self._see_gradient, gradient, moment)

    def _at_checkpoint(self, watched: _Watched, path: str, tensor: torch.Tensor, gradient: Place) -> None:
        """Await the gradient of an input that may be where a checkpoint begins.

        The first pass, under no_grad, is given the model's own tensor, and the recomputation a detached copy, of which
        the gradient lacks what other users of the tensor add (the residual, where only a norm is recomputed). So the
        first is watched, and the copy is not.
        """
        phase, moment, _ = watched.current
        if torch.is_grad_enabled():
            if phase != "recompute" or (path, moment) not in watched.entered:
                await_gradient(tensor, self._see_gradient, gradient, moment)
        elif phase == "forward":
            see, calls = self._see_gradient, watched.calls

            def see_if_recomputed(place: Place, found: torch.Tensor, at: Moment) -> None:
                # A forward under no_grad that is not recomputed gets no gradient, whatever its input gets from others.
                if ("recompute", at) in calls:
                    see(place, found, at)

            watched.entered.add((path, moment))
            await_gradient(tensor, see_if_recomputed, gradient, moment)

    def _gradient(self) -> See:
        """The function that receives the gradients of this step; a new one per step, so late gradients are ignored."""
        this_round = self._round

        def see(place: Place, gradient: torch.Tensor, moment: Moment) -> None:
            if not self._active or self._round != this_round:
                return
            try:
                self._clock.backward_moment = moment
                self._sink.see(place, gradient, moment.microbatch, "backward")
            except Exception as error:
                self._gradient_fault(error, place)

        return see

    def _gradient_fault(self, error: BaseException, place: Place) -> None:
        self._fault(error, f"gradient of {place.io} of {place.name}")

    def _places(self, watched: _Watched, io: str, path: str) -> _Places:
        """The places of a tensor, made on first use."""
        return watched.places.get((io, path)) or self._make_places(watched, io, path)

    def _make_places(self, watched: _Watched, io: str, path: str) -> _Places:
        entry, layout = watched.entry, watched.layout
        call, plain_path = _split(path)
        number = call + calls_before(entry, layout)
        recorded = ".".join(part for part in (f"call{number}" if number else "", plain_path) if part)

        def spec(shape: tuple[int, ...]) -> ShardSpec:
            return activation_spec(entry, io, plain_path, len(shape), layout)

        def spec_of_gradient(shape: tuple[int, ...]) -> ShardSpec:
            return activation_spec(entry, io, plain_path, len(shape), layout, gradient=True)

        op = type(entry.module).__name__
        activation, gradient = (
            Place(kind, entry.name, io, recorded, op, watched.chunk, watched.site, spec_of, self._where.size)
            for kind, spec_of in (("activation", spec), ("gradient", spec_of_gradient))
        )
        absent = at_stage_boundary(entry, io, plain_path, layout)
        value, also = self._chosen(watched, io, plain_path)
        found = watched.places[io, path] = _Places(activation, gradient, absent, value, also)
        return found

    def _chosen(self, watched: _Watched, io: str, path: str) -> tuple[bool, bool]:
        """Whether value and gradient are selected, for sinks that select single tensors of a module."""
        wants = getattr(self._sink, "wants_tensor", None)
        if wants is None:
            return True, True
        position = _position(watched, io, path.partition(".")[0])
        return wants(watched.entry.name, io, False, position), wants(watched.entry.name, io, True, position)


def _split(path: str) -> tuple[int, str]:
    """Number of the call that begins a path, 0 without one, and the path inside the call."""
    match = _CALL.match(path)
    return (int(match[1]), path[match.end() :]) if match else (0, path)


def _position(watched: _Watched, io: str, name: str) -> int:
    """Index of an argument or result of a module; arguments taken by **kwargs are numbered as they arrive."""
    known = watched.parameters if io == "input" else ()
    if name in known:
        return known.index(name)
    if not name or name.isdigit():
        return int(name or 0)
    paths = [_split(path)[1] for side, path in watched.places if side == io]
    others = [other for other in dict.fromkeys(path.partition(".")[0] for path in paths) if other not in known]
    return len(known) + (others.index(name) if name in others else len(others))


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the positional parameters of forward, so an argument has one path however it is passed."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)
