"""Probe: dump. Decides which tensors get a row, measures each once, and hands a step's rows to the writer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from msprobe_megatron.clock import Clock
from msprobe_megatron.config import DumpConfig
from msprobe_megatron.measure.once import SeenTensors
from msprobe_megatron.measure.stats import measure_into
from msprobe_megatron.record.schema import Row
from msprobe_megatron.record.slots import SlotTable
from msprobe_megatron.record.writer import StepBatch
from msprobe_megatron.topology.layers import layer_of
from msprobe_megatron.topology.places import Place

_kind_of: Callable[[Row], str] = attrgetter("kind")


class DumpProbe:
    """Rows of statistics for what the `dump` section of the probe file asks.

    Example::

        probe = DumpProbe(config.dump, clock, slots)
        probe.see(place, tensor, microbatch=0, phase="forward")
        writer.submit(probe.finish(complete=True, sites={}))
    """

    def __init__(self, config: DumpConfig, clock: Clock, slots: SlotTable) -> None:
        self._config, self._clock, self._slots = config, clock, slots
        self._matchers = {text: _matcher(text) for text in config.list}
        self._seen = SeenTensors()
        self._rows: list[Row] = []
        self._dtypes: dict[torch.dtype, str] = {}
        self.matched: set[str] = set()
        self.fired: Counter[str] = Counter()
        self.unmeasured = 0

    def wants(self, name: str) -> bool:
        """Whether a module or parameter of this name is selected by `list` and `layers`."""
        layers = self._config.layers
        if layers is not None and (layer := layer_of(name)) is not None and layer not in layers:
            return False
        hits = [text for text, matches in self._matchers.items() if matches(name)]
        self.matched.update(hits)
        return bool(hits) or not self._matchers

    def wants_io(self, direction: str, io: str) -> bool:
        """Whether `data_mode` selects the inputs or outputs of forward or backward."""
        modes = set(self._config.data_mode)
        if "all" in modes or not modes:
            return True
        directions = modes & {"forward", "backward"} or {"forward", "backward"}
        sides = modes & {"input", "output"} or {"input", "output"}
        return direction in directions and io in sides

    def unmatched(self) -> list[str]:
        """Patterns of `list` that no module or parameter of this rank has."""
        return [text for text in self._matchers if text not in self.matched]

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Measure a tensor, unless it was measured a moment ago, and write its row."""
        chosen = self._config.microbatches
        if chosen is not None and microbatch is not None and microbatch not in chosen:
            return
        slot = self._seen.lookup(tensor)
        if slot is None:
            slot = self._slots.take()
            if slot >= 0:
                if measure_into(tensor, self._slots.floats(slot), self._slots.counts(slot)):
                    self._seen.remember(tensor, slot)
                else:
                    slot = -1
            if slot < 0:
                self.unmeasured += 1
        shape = tuple(tensor.shape)
        shard, whole = place.layout(shape)
        dtype = self._dtypes.get(tensor.dtype)
        if dtype is None:
            dtype = self._dtypes[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
        self._rows.append(
            Row(
                self._clock.tick(),
                microbatch,
                phase,
                place.vpp,
                place.kind,
                place.name,
                place.io,
                place.path,
                place.op,
                place.site,
                dtype,
                shape,
                whole,
                shard,
                tensor.numel(),
                slot,
                None,
            )
        )

    def ledger(self) -> dict[str, Any]:
        """What fired, and what could not be measured or matched."""
        return {
            "unmatched": self.unmatched(),
            "fired": dict(self.fired),
            "unmeasured": self.unmeasured,
            "no_room": self._slots.dropped,
        }

    def memory_changed(self) -> None:
        """Something was written that version counters do not tell of: measure everything anew."""
        self._seen.invalidate()

    def finish(self, complete: bool, sites: dict[str, Any]) -> StepBatch:
        """The step's rows, ready for the writer; the probe is empty again."""
        rows, self._rows = self._rows, []
        self.fired.update(map(_kind_of, rows))
        self._seen.forget_all()
        return StepBatch(self._clock.step, rows, self._slots.seal(), sites, complete)


def _matcher(text: str) -> Callable[[str], bool]:
    """`/regex/` searches, anything else is a substring."""
    if len(text) > 2 and text.startswith("/") and text.endswith("/"):
        pattern = re.compile(text[1:-1])
        return lambda name: pattern.search(name) is not None
    return lambda name: text in name
