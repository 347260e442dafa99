"""Site: states of the optimizer: moments, master weights, clipped gradients, the update.

Read around the step of the inner optimizer that Megatron's wraps, which begins with gradients already unscaled and
clipped; of a sharded optimizer only this rank's shards, by the optimizer's own range map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from msprobe_megatron.config import MonitorConfig
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.module.hooks import HookedSite
from msprobe_megatron.job.sites.sink import Reading, SeriesSink
from msprobe_megatron.job.sites.training.gradients import WatchedParameters
from msprobe_megatron.job.sites.training.progress import scalar_place
from msprobe_megatron.topology.shards import Place
from msprobe_megatron.topology.shards_of.dtensors import local_part
from msprobe_megatron.topology.shards_of.optimizer_values import (
    MASTER,
    has_master,
    is_encoded,
    state_value,
    weight_value,
)
from msprobe_megatron.topology.shards_of.optimizers import Owned, inner, leaves, owned

UPDATE_BYTES = 16 << 20
"""Limit for copies of weights kept while the optimizer steps; beyond it, an equal share of each parameter is read."""
_MOMENTA = ("exp_avg", "momentum_buffer")
_SQUARES = "exp_avg_sq"
Fault = Callable[[BaseException, str], None]


class _Update(NamedTuple):
    """Places of the rows of an update."""

    change: Place
    weight: Place
    ratio: Place


class _States:
    """The state tensors of all entries, as found at one step."""

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
        """Whether nothing was added or replaced since; loading a checkpoint replaces states."""
        return (
            len(entries) == len(self._mains)
            and all(entry.main is main for entry, main in zip(entries, self._mains, strict=True))
            and all(optimizer.state.get(main) is state for optimizer, main, state in self._dictionaries)
            and [len(state) for _, _, state in self._dictionaries] == self._lengths
            and all(state.get(name) is tensor for state, name, tensor in self._found)
        )


class OptimizerStates(HookedSite):
    """The states of the watched parameters."""

    def __init__(
        self, optimizer: Any, watched: WatchedParameters, sink: SeriesSink, config: MonitorConfig, fault: Fault
    ) -> None:
        super().__init__()
        self._optimizer, self._watched, self._sink = optimizer, watched, sink
        self._config, self._fault = config, fault
        self._entries: list[Owned] = []
        self._places: dict[tuple[int, str, str], Place] = {}
        self._readings: dict[str, Reading] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._states: _States | None = None
        self._stepped = False
        self._hooked = config.clipped or config.agreement or config.update
        self.without_hooks: set[str] = set()
        """Optimizer classes without step hooks."""

    def install(self) -> None:
        """Start to report steps of the inner optimizers; hooks that are still set are reused."""
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
        """Ignore what the hooks see, leave them in place, and free the copies of weights."""
        super().pause()
        self._before.clear()

    def remove(self) -> None:
        """Remove the hooks. Safe to call twice."""
        super().remove()
        self._before.clear()

    def _about_to_step(self, optimizer: Any, *ignored: Any) -> None:
        if not self._active:
            return
        try:
            with untraced(), torch.no_grad():
                mine = [entry for entry in self._entries if entry.optimizer is optimizer]
                if self._config.clipped:
                    given = [(e, g) for e in mine if (g := e.gradient()) is not None]
                    self._read(f"clipped {id(optimizer)}", [(e, "grad_clipped", "weight", g) for e, g in given])
                if self._config.agreement:
                    self._agreement(mine)
                if self._config.update:
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
            # The first elements: the same ones in every step, so that curves are smooth.
            self._before[id(entry.main)] = weight_value(entry).reshape(-1)[:share].clone()

    def after_step(self) -> None:
        """The outermost optimizer has stepped."""
        self._stepped = True
        if self._config.optimizer:
            self._read_states()
        if self._config.master_weights:
            # A parameter that the optimizer updates directly has no master weight.
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
                    self._report_update(entry, before)

    def _read_states(self) -> None:
        """Report the states; their tensors are searched for again only if something was added or replaced."""
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
        # One by one: all of them decoded to float32 at once would cost the memory that the encoding saves.
        for entry, name in known.encoded:
            self._see(entry, name, state_value(entry, name))

    def _see(self, entry: Owned, io: str, value: torch.Tensor) -> None:
        value = value.reshape(local_part(entry.main).shape)
        self._sink.see(self._place(entry, "optimizer_state", io), value, None, "optimizer")

    def absent(self) -> list[str]:
        """Requested states that an optimizer class does not have; known after the first step."""
        by_class: dict[str, list[Owned]] = {}
        for entry in self._entries if self._stepped else ():
            by_class.setdefault(type(entry.optimizer).__name__, []).append(entry)
        return [line for name, entries in sorted(by_class.items()) for line in self._absent_in(name, entries)]

    def _absent_in(self, name: str, entries: Sequence[Owned]) -> Iterator[str]:
        kept = {state for entry in entries for state in entry.states()}
        momentum = next((state for state in _MOMENTA if state in kept), None)
        if self._config.optimizer and momentum is None:
            yield f"{name} keeps no first moment ({' or '.join(_MOMENTA)})"
        if self._config.optimizer and _SQUARES not in kept:
            yield f"{name} keeps no {_SQUARES}"
        if self._config.agreement and momentum is None:
            yield f"{name} has no momentum: no sign_agreement"
        if self._config.master_weights and not any(has_master(entry) for entry in entries):
            yield f"{name} works on the weights themselves: no master_weight"

    def _report_update(self, entry: Owned, before: torch.Tensor) -> None:
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
