"""Site: what the optimizer keeps and does: moments, master weights, clipped gradients, the update.

Read around the step of the optimizer that Megatron's is built on, which has its gradients unscaled and clipped when it
begins; on a rank that holds shards only those, by the optimizer's own map of ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from msprobe_megatron.config import MonitorConfig
from msprobe_megatron.probes.monitor import Reading
from msprobe_megatron.sites.arguments import own_work
from msprobe_megatron.sites.gradients import WatchedParameters
from msprobe_megatron.sites.progress import scalar_place
from msprobe_megatron.topology.dtensors import local_part
from msprobe_megatron.topology.optimizer_values import MASTER, has_master, is_encoded, state_value, weight_value
from msprobe_megatron.topology.optimizers import Owned, inner, leaves, owned
from msprobe_megatron.topology.places import Place

UPDATE_BYTES = 16 << 20
"""Copies of weights that are kept while the optimizer steps; beyond, an equal share of each parameter is looked at."""
_MOMENTA = ("exp_avg", "momentum_buffer")
_SQUARES = "exp_avg_sq"
Fault = Callable[[BaseException, str], None]


class Sink(Protocol):
    """Who is told of the optimizer's tensors."""

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Take note of a tensor, now."""

    def read(self, reading: Reading, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Take note of many tensors, now; returns their slots."""

    def ratio(self, place: Place, above: int, below: int) -> None:
        """Take note of the norm of one slot over that of another."""


class _Update(NamedTuple):
    """Places of what is said about an update."""

    change: Place
    weight: Place
    ratio: Place


class _States:
    """Where the states of all entries were found."""

    def __init__(
        self, entries: list[Owned], found: Sequence[tuple[Owned, str, torch.Tensor]], reading: Reading
    ) -> None:
        self.reading = reading
        self.tensors = [local_part(tensor).detach() for entry, name, tensor in found if not is_encoded(entry, name)]
        self.encoded = [(entry, name) for entry, name, _ in found if is_encoded(entry, name)]
        self._mains = [entry.main for entry in entries]
        self._dictionaries = [(entry.optimizer, entry.main, entry.state()) for entry in entries]
        self._lengths = [len(state) for _, _, state in self._dictionaries]
        self._found = [(entry.state(), name, tensor) for entry, name, tensor in found]

    def still_there(self, entries: Sequence[Owned]) -> bool:
        """Whether nothing was added or replaced since, as loading a checkpoint does."""
        return (
            len(entries) == len(self._mains)
            and all(entry.main is main for entry, main in zip(entries, self._mains, strict=True))
            and all(optimizer.state.get(main) is state for optimizer, main, state in self._dictionaries)
            and [len(state) for _, _, state in self._dictionaries] == self._lengths
            and all(state.get(name) is tensor for state, name, tensor in self._found)
        )


class OptimizerStates:
    """The states of the watched parameters.

    Example::

        site = OptimizerStates(optimizer, watched, probe, config.monitor, fault)
        site.install()
        optimizer.step()
        site.after_step()
    """

    def __init__(
        self, optimizer: Any, watched: WatchedParameters, sink: Sink, asked: MonitorConfig, fault: Fault
    ) -> None:
        self._optimizer, self._watched, self._sink = optimizer, watched, sink
        self._asked, self._fault = asked, fault
        self._entries: list[Owned] = []
        self._places: dict[tuple[int, str, str], Place] = {}
        self._readings: dict[str, Reading] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._states: _States | None = None
        self._handles: list[Any] = []
        self._active = self._stepped = False
        self._hooked = asked.clipped or asked.agreement or asked.update
        self.without_hooks: set[str] = set()
        """Classes of optimizers around whose step nothing can be read."""

    def install(self) -> None:
        """Begin to see the steps of the inner optimizers; hooks that are still there are used again."""
        self._active = True
        self._entries = [entry for entry in owned(self._optimizer) if entry.parameter in self._watched]
        if self._handles or not self._hooked:
            return
        for leaf in leaves(self._optimizer):
            base = inner(leaf)
            if base is None:
                continue
            if not hasattr(base, "register_step_pre_hook"):
                self.without_hooks.add(type(base).__name__)
                continue
            self._handles.append(base.register_step_pre_hook(self._about_to_step))

    def pause(self) -> None:
        """See nothing; leave the hooks."""
        self._active = False
        self._before.clear()

    def remove(self) -> None:
        """Take the hooks away. Safe to call twice."""
        self.pause()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _about_to_step(self, optimizer: Any, *ignored: Any) -> None:
        if not self._active:
            return
        try:
            with own_work(), torch.no_grad():
                mine = [entry for entry in self._entries if entry.optimizer is optimizer]
                if self._asked.clipped:
                    given = [(e, g) for e in mine if (g := e.gradient()) is not None]
                    self._read(f"clipped {id(optimizer)}", [(e, "grad_clipped", "weight", g) for e, g in given])
                if self._asked.agreement:
                    self._agreement(mine)
                if self._asked.update:
                    self._keep(mine)
        except Exception as error:
            self._fault(error, "gradients at the step of the optimizer")

    def _agreement(self, mine: Sequence[Owned]) -> None:
        for entry in mine:
            gradient, states = entry.gradient(), entry.states()
            kept = next((name for name in _MOMENTA if name in states), None)
            if gradient is None or kept is None:
                continue  # before the first step there is no momentum
            gradient, momentum = local_part(gradient), state_value(entry, kept)
            same = torch.sign(gradient).eq_(torch.sign(momentum.to(gradient.dtype)).reshape(gradient.shape))
            self._sink.see(self._place(entry, "optimizer_state", "sign_agreement"), same, None, "optimizer")

    def _keep(self, mine: Sequence[Owned]) -> None:
        share = UPDATE_BYTES // (4 * max(1, len(self._entries)))
        for entry in mine:
            # An equal share from the beginning: the same elements in every step, so that curves are smooth.
            self._before[id(entry.main)] = weight_value(entry).reshape(-1)[:share].clone()

    def after_step(self) -> None:
        """The outermost optimizer has stepped."""
        self._stepped = True
        if self._asked.optimizer:
            self._read_states()
        if self._asked.master_weights:
            # A parameter that the optimizer works on itself has no other weight.
            masters = [entry for entry in self._entries if has_master(entry)]
            decoded = [entry for entry in masters if is_encoded(entry, MASTER)]
            plain = [entry for entry in masters if not is_encoded(entry, MASTER)]
            self._read("master", [(e, "optimizer_state", "master_weight", weight_value(e)) for e in plain])
            for entry in decoded:
                self._see(entry, "master_weight", weight_value(entry))
        with torch.no_grad():
            for entry in self._entries:
                before = self._before.pop(id(entry.main), None)
                if before is not None:
                    self._tell_update(entry, before)

    def _read_states(self) -> None:
        """Optimizers keep their states where they are: what was found once is only looked up again."""
        known = self._states
        if known is None or not known.still_there(self._entries):
            found = [(e, name, x) for e in self._entries for name, x in e.states().items() if name != MASTER]
            if not found:
                return
            plain = [(e, name) for e, name, _ in found if not is_encoded(e, name)]
            reading = Reading([self._place(e, "optimizer_state", name) for e, name in plain], "optimizer")
            known = self._states = _States(list(self._entries), found, reading)
        if known.tensors:
            self._sink.read(known.reading, known.tensors)
        # One by one: all of them in float32 at once would be what the optimizer saves.
        for entry, name in known.encoded:
            self._see(entry, name, state_value(entry, name))

    def _see(self, entry: Owned, io: str, value: torch.Tensor) -> None:
        value = value.reshape(local_part(entry.main).shape)
        self._sink.see(self._place(entry, "optimizer_state", io), value, None, "optimizer")

    def absent(self) -> list[str]:
        """What was asked and no optimizer of this kind has, by the optimizer's name; known after the first step.

        Example::

            site.absent()       # ['SGD keeps no exp_avg_sq']
        """
        by_class: dict[str, list[Owned]] = {}
        for entry in self._entries if self._stepped else ():
            by_class.setdefault(type(entry.optimizer).__name__, []).append(entry)
        return [line for name, entries in sorted(by_class.items()) for line in self._absent_in(name, entries)]

    def _absent_in(self, name: str, entries: Sequence[Owned]) -> Iterator[str]:
        kept = {state for entry in entries for state in entry.states()}
        momentum = next((state for state in _MOMENTA if state in kept), None)
        if self._asked.optimizer and momentum is None:
            yield f"{name} keeps no first moment ({' or '.join(_MOMENTA)})"
        if self._asked.optimizer and _SQUARES not in kept:
            yield f"{name} keeps no {_SQUARES}"
        if self._asked.agreement and momentum is None:
            yield f"{name} has no momentum: no sign_agreement"
        if self._asked.master_weights and not any(has_master(entry) for entry in entries):
            yield f"{name} works on the weights themselves: no master_weight"

    def _tell_update(self, entry: Owned, before: torch.Tensor) -> None:
        after = weight_value(entry).reshape(-1)[: before.numel()]
        update = self._update(entry, before.numel())
        reading = self._readings.setdefault(f"update {id(entry.main)}", Reading(update[:2], "optimizer"))
        change, weight = self._sink.read(reading, [after - before, before])
        self._sink.ratio(update.ratio, change, weight)

    def _update(self, entry: Owned, seen: int) -> _Update:
        places = (self._place(entry, "update", io, seen) for io in ("change", "weight", "ratio"))
        return _Update(*places)

    def _read(self, name: str, found: Sequence[tuple[Owned, str, str, torch.Tensor]]) -> None:
        if not found:
            return
        places = [self._place(entry, kind, io) for entry, kind, io, _ in found]
        reading = self._readings.get(name)
        if reading is None or reading.places != places:
            reading = self._readings[name] = Reading(places, "optimizer")
        self._sink.read(reading, [local_part(tensor).detach() for *_, tensor in found])

    def _place(self, entry: Owned, kind: str, io: str, seen: int | None = None) -> Place:
        key = (id(entry.main), kind, io)
        found = self._places.get(key)
        if found is None:
            part = entry.part
            if seen is not None and seen < entry.main.numel():
                start = part[0] if part is not None else 0
                part = (start, start + seen)
            found = self._watched.place(entry.parameter, kind, io, part=part)
            if io == "ratio":
                found = scalar_place(kind, found.name, io, op=found.op, vpp=found.vpp or 0)
            self._places[key] = found
        return found
