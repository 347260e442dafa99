"""Filters in front of the dump probe: `dump.scope`, a window between two names, and `dump.slice`, a part of a tensor.

A site passes everything to its sink; these decide and pass on. Where neither is configured they are not installed and
cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from msprobe_megatron.config import ConfigError, Slice
from msprobe_megatron.job.sites.sink import Sink
from msprobe_megatron.topology.layers import layer_of
from msprobe_megatron.topology.shards import Place, ShardSpec

_SLICED = ShardSpec.unmergeable("slice")


class Scoped:
    """Passes on what runs from the beginning of one module or call to the end of another, and its gradients.

    The forward of every microbatch determines the window; gradients, recomputed forwards and parameters follow the
    names that were in it. On a pipeline stage without the first name, the window is open from the start if the name
    belongs to an earlier stage (`opened`). `alone` says that there are no other stages.
    """

    def __init__(self, sink: Sink, first: str, last: str, *, opened: bool, alone: bool) -> None:
        self._sink, self._first, self._last, self._opened, self._alone = sink, first, last, opened, alone
        self._open = opened
        self._closing = False
        self._pass: tuple[int | None, int] | None = None
        self._names: set[str] = set()
        self.began = self.ended = False

    def wants(self, name: str) -> bool:
        """True if the name is selected, should it turn out to be in the window."""
        return self._sink.wants(name)

    def wants_io(self, direction: str, io: str) -> bool:
        """Always True: every forward is needed to determine the window."""
        return True

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Pass on what is in the window."""
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
        """Ends of the window that never ran, as lines for the user; names of other stages are not missed."""
        ends = (("first", self._first, self.began), ("last", self._last, self.ended)) if self._alone else ()
        return [f"dump.scope: the {which} name, {name}, was never called" for which, name, seen in ends if not seen]


def check_window(level: str, first: str, last: str, names: Sequence[str], source: str, alone: bool) -> None:
    """Raise ``ConfigError`` if the two names of ``dump.scope`` cannot be a window, as far as known before training.

    `names` are the modules of this rank in the order of definition; `alone` says that no other stage can have more.
    Of an API call only the module is known.
    """
    modules = []
    for name in (first, last):
        module, slash, _ = name.partition("/")
        if level == "L0" and slash:
            raise ConfigError(f"{source}: dump.scope: {name!r} is an API call; level is L0; accepted: L1, mix")
        if level == "L1" and not slash:
            raise ConfigError(
                f"{source}: dump.scope: {name!r} is a module; level is L1; accepted: a call such as"
                " decoder.layers.0.mlp/torch.nn.functional.silu.0, or level mix"
            )
        if alone and module not in names and module != "outside":
            raise ConfigError(
                f"{source}: dump.scope: {module!r} is no module; accepted: a canonical name such as"
                f" {', '.join(names[:6])}"
            )
        modules.append(module)
    before, after = modules
    backwards = (
        names.index(after) < names.index(before)
        if before in names and after in names
        else (layer_of(after) or 0) < (layer_of(before) or 0) and layer_of(after) is not None
    )
    # A module that contains the first name ends after it, though it is defined before it.
    if backwards and after != "model" and not before.startswith(f"{after}."):
        raise ConfigError(f"{source}: dump.scope: {last!r} comes before {first!r}; accepted: [first, last] in order")


def open_at_start(first: str, names: Iterable[str], first_stage: bool) -> bool:
    """True if the window is open on a pipeline stage with these names before anything runs on it.

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
    """Passes on a slice of every tensor: each dimension is cut by the first rule that fits it."""

    def __init__(self, sink: Sink, rules: tuple[Slice, ...]) -> None:
        self._sink, self._rules = sink, rules
        self._places: dict[int, tuple[Place, Place]] = {}
        self.wants, self.wants_io = sink.wants, sink.wants_io

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Pass on the requested part; a tensor that no rule fits is passed on whole."""
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
        """The same place for a tensor whose layout is no longer known."""
        found = self._places.get(id(place))
        if found is None:
            cut = Place(
                place.kind,
                place.name,
                place.io,
                place.path,
                place.op,
                place.vpp,
                place.site,
                lambda shape: _SLICED,
                lambda axis: 1,
                extra=place.extra,
            )
            found = self._places[id(place)] = (cut, place)
        return found[0]
