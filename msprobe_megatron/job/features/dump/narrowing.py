"""Sinks that stand before the dump probe and let through less: a window between two names, a slice of every tensor.

A site tells its sink of everything; these decide and hand on. Where neither is asked for they are not there, so that
they cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from msprobe_megatron.config.schema import Slice
from msprobe_megatron.topology.layers import layer_of
from msprobe_megatron.topology.places import Place
from msprobe_megatron.topology.shards import ShardSpec

_SLICED = ShardSpec.unmergeable("slice")


class Sink(Protocol):
    """Whom the rest is told to."""

    def wants(self, name: str) -> bool:
        """Whether this name is selected."""

    def wants_io(self, direction: str, io: str) -> bool:
        """Whether inputs or outputs of forward or backward are selected."""

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Take note of a tensor."""


class Scoped:
    """Lets through what runs from the beginning of one module or call to the end of another, and its gradients.

    The window is found in the forward of every microbatch; gradients, repeated forwards and parameters follow the names
    that were in it. On a pipeline stage that does not have the first name, the window is open from the start if the
    name belongs to a stage before (`opened`). `alone` says that there are no other stages.

    Example::

        sink = Scoped(probe, "decoder.layers.1", "decoder.layers.2.mlp", opened=False, alone=True)
    """

    def __init__(self, sink: Sink, first: str, last: str, *, opened: bool, alone: bool) -> None:
        self._sink, self._first, self._last, self._opened, self._alone = sink, first, last, opened, alone
        self._open = opened
        self._closing = False
        self._pass: tuple[int | None, int] | None = None
        self._names: set[str] = set()
        self.began = self.ended = False

    def wants(self, name: str) -> bool:
        """Whether the name is selected, if it turns out to be in the window."""
        return self._sink.wants(name)

    def wants_io(self, direction: str, io: str) -> bool:
        """Everything: the forward shows where the window is."""
        return True

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Hand on what is in the window."""
        inside = self._moves(place, microbatch) if phase == "forward" else self._known(place)
        direction = "backward" if place.kind == "gradient" else "forward"
        if inside and (microbatch is None or self._sink.wants_io(direction, place.io)):
            self._sink.see(place, tensor, microbatch, phase)

    def _moves(self, place: Place, microbatch: int | None) -> bool:
        if self._pass != (microbatch, place.vpp):
            self._pass = (microbatch, place.vpp)
            self._open, self._closing = self._opened, False
        name = place.name
        if name == self._first:
            self.began = self._open = True
        if self._closing and name != self._last:
            self._open = self._closing = False
        if self._open:
            self._names.add(name)
            if name == self._last and place.io == "output":
                self._closing = self.ended = True
        return self._open

    def _known(self, place: Place) -> bool:
        return place.name in self._names or place.name.rpartition(".")[0] in self._names

    def missed(self) -> list[str]:
        """Ends of the window that never came, in words for the user; what another stage has is not missed."""
        ends = (("first", self._first, self.began), ("last", self._last, self.ended)) if self._alone else ()
        return [f"dump.scope: the {which} name, {name}, was never called" for which, name, seen in ends if not seen]


def open_at_start(first: str, names: Iterable[str], first_stage: bool) -> bool:
    """Whether the window is open on a pipeline stage with these names before anything runs on it.

    Example::

        >>> open_at_start("decoder.layers.0", ["decoder.layers.2", "decoder.layers.3"], first_stage=False)
        True
    """
    module = first.partition("/")[0]
    here = list(names)
    if module in here or first_stage:
        return False
    layer, layers = layer_of(module), [n for name in here if (n := layer_of(name)) is not None]
    return layer is None or not layers or layer < min(layers)


class Sliced:
    """Lets through a slice of every tensor: the first rule that fits a dimension cuts it.

    Example::

        sink = Sliced(probe, (Slice(dim=1, begin=0, end=16),))
    """

    def __init__(self, sink: Sink, rules: tuple[Slice, ...]) -> None:
        self._sink, self._rules = sink, rules
        self._places: dict[int, tuple[Place, Place]] = {}
        self.wants, self.wants_io = sink.wants, sink.wants_io

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Hand on the part that is asked for; a tensor that no rule fits goes on whole."""
        part, cut = tensor, set()
        for rule in self._rules:
            dim = rule.dim
            if dim < tensor.dim() and dim not in cut and (rule.size is None or tensor.shape[dim] == rule.size):
                cut.add(dim)
                end = part.shape[dim] if rule.end is None else min(rule.end, part.shape[dim])
                begin = min(rule.begin, end)
                part = part.detach().narrow(dim, begin, end - begin)
        self._sink.see(self._place(place) if cut else place, part, microbatch, phase)

    def _place(self, place: Place) -> Place:
        """The same place for a tensor whose layout is not known any more."""
        found = self._places.get(id(place))
        if found is None:
            cut = Place(
                *(place.kind, place.name, place.io, place.path, place.op, place.vpp, place.site),
                lambda shape: _SLICED,
                lambda axis: 1,
                extra=place.extra,
            )
            found = self._places[id(place)] = (cut, place)
        return found[0]
