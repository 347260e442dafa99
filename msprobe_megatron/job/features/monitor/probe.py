"""Probe: monitor. Decides what is watched, measures it, and hands the rows of a step to the writer.

Steps of a training are alike. A row is made when something is seen for the first time and is used again as long as the
next steps see the same things in the same order; then nothing is left of a sighting but the measuring.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from msprobe_megatron.clock import Clock
from msprobe_megatron.config import MonitorConfig
from msprobe_megatron.measure.many import Many
from msprobe_megatron.measure.measurer import Measurer
from msprobe_megatron.measure.once import SeenTensors, key_of
from msprobe_megatron.probes.targets import Targets
from msprobe_megatron.record.monitor import MonitorBatch, MonitorFile
from msprobe_megatron.record.monitor_table import Summed
from msprobe_megatron.record.schema import Row
from msprobe_megatron.record.slots import SlotTable
from msprobe_megatron.record.watching import Watcher
from msprobe_megatron.topology.places import Place

_WORTH_REMEMBERING = 1 << 14
"""Elements from which on measuring costs more than finding out that it was done already."""
_Key = tuple[Any, ...]


class Reading:
    """Tensors that are always measured together, at one moment of the step.

    Example::

        reading = Reading(places, "optimizer")
        probe.read(reading, tensors)
    """

    def __init__(self, places: Sequence[Place], phase: str) -> None:
        self.places, self.phase = list(places), phase
        self.many: Many | None = None


class MonitorProbe:
    """Rows of statistics for what the `monitor` section of the probe file asks.

    Example::

        probe = MonitorProbe(config.monitor, clock, slots, watchers, fault)
        probe.see(place, tensor, microbatch=0, phase="forward")
        writer.submit(probe.finish())
    """

    def __init__(
        self,
        config: MonitorConfig,
        clock: Clock,
        slots: SlotTable,
        watchers: Sequence[Watcher],
        fault: Callable[[BaseException, str], None],
    ) -> None:
        self._config, self._clock, self._slots = config, clock, slots
        self._watchers, self._fault = watchers, fault
        self.targets = Targets(config.targets)
        self._measure = Measurer(slots)
        self._digest = Measurer(slots, digest=True)
        self._seen = SeenTensors()
        self._rows: list[Row] = []
        self._keys: list[_Key] = []
        self._at = 0
        self._shared = False
        self._values: list[tuple[int, float]] = []
        self._ratios: list[tuple[int, int, int]] = []
        self._dtypes: dict[torch.dtype, str] = {}
        self._summed: dict[int, tuple[list[Row], Summed]] | None = {} if config.microbatches == "summed" else None
        self._total: Counter[str] = Counter()
        self._counted: tuple[list[Row], int] = (self._rows, 0)
        self.file = MonitorFile(config.every)
        self.unmeasured = 0
        self.late = 0
        self._turn = 0  # even while a step is open, odd while it is being closed
        # Between the last look at the turn and the row no step may end, and no other thread come in between.
        self._noting = threading.RLock()

    # What sites ask.

    def wants(self, name: str) -> bool:
        """Whether a module of this name is watched; communication, which has names of its own, always is."""
        return "/" in name or (self._config.activations and self.targets.module(name))

    def wants_parameter(self, name: str) -> bool:
        """Whether a parameter of this name is watched."""
        return self.targets.parameter(name)

    def wants_io(self, direction: str, io: str) -> bool:
        """Whether inputs or outputs of forward or backward are watched."""
        return self._config.direction in ("both", direction)

    def wants_tensor(self, name: str, io: str, gradient: bool, position: int) -> bool:
        """Whether the tensor at this position of a module's arguments or results is watched."""
        return self.targets.tensor(name, io, gradient, position)

    # What sites tell.

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Measure a tensor, unless it was measured a moment ago."""
        turn = self._turn
        key = key_of(tensor) if tensor.numel() >= _WORTH_REMEMBERING else None
        slot = self._seen.get(key) if key is not None else None
        measured = slot is None
        if slot is None:
            slot = self._measured(tensor)
        with self._noting:
            if turn != self._turn or turn & 1:
                self._came_late(slot)
                return
            if measured and slot >= 0:
                self._seen.put(key, tensor, slot)
            self._note(place, tensor, microbatch, phase, slot)

    def see_digest(self, place: Place, tensor: torch.Tensor, microbatch: int | None) -> None:
        """Measure a tensor with the digest of its elements."""
        turn = self._turn
        slot = self._slots.take()
        if slot >= 0 and not self._digest(tensor, slot):
            slot = -1
        with self._noting:
            if turn != self._turn or turn & 1:
                self._came_late(slot)
                return
            self._note(place, tensor, microbatch, "forward", slot)

    def _came_late(self, slot: int) -> None:
        """A thread of the host went on while the step ended: nobody knows whose its slot is."""
        self.late += 1
        self._slots.spoil(slot)

    def read(self, reading: Reading, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Measure all tensors of a reading; returns their slots."""
        take = self._slots.take
        slots = [take() for _ in tensors]
        if -1 in slots:  # counted by the table
            return slots
        if reading.many is None:
            reading.many = Many(self._measure)
        for position in reading.many(tensors, slots):
            self.unmeasured += 1
            slots[position] = -1
        with self._noting:
            self._note_all(reading, tensors, slots)
        return slots

    def _note_all(self, reading: Reading, tensors: Sequence[torch.Tensor], slots: list[int]) -> None:
        at, first = self._at, slots[0] if slots else -1
        if at < len(self._keys) and self._keys[at][0] is reading and self._keys[at][4] == first:
            self._at = at + 1
            return
        self._part_from(at)
        self._keys.append((reading, None, reading.phase, None, first, None, len(self._rows)))
        for place, tensor, slot in zip(reading.places, tensors, slots, strict=True):
            self._add(place, tensor, None, reading.phase, slot)
        self._at = at + 1

    def value(self, place: Place, number: float, microbatch: int | None = None) -> int:
        """Take note of a number that the host knows; returns its slot."""
        slot = self._slots.take()
        if slot >= 0:
            self._values.append((slot, float(number)))
        with self._noting:
            self._note(place, None, microbatch, "optimizer", slot)
        return slot

    def ratio(self, place: Place, above: int, below: int) -> None:
        """Take note of the norm of one slot over that of another; worked out when the numbers are on the host."""
        slot = self._slots.take()
        if slot >= 0 and above >= 0 and below >= 0:
            self._ratios.append((slot, above, below))
        with self._noting:
            self._note(place, None, None, "optimizer", slot)

    def memory_changed(self) -> None:
        """Something was written that version counters do not tell of: measure everything anew."""
        if len(self._seen):
            self._seen.invalidate()

    def finish(self) -> MonitorBatch:
        """The step's rows, ready for the writer; the probe is ready for the next step."""
        with self._noting:  # who is making a row ends it first; from here on other threads come too late
            self._turn += 1
        if self._at < len(self._keys):
            self._part_from(self._at)
        self._seen.forget_all()
        rows, self._shared, self._at = self._rows, True, 0
        if rows is not self._counted[0]:
            self._total, self._counted = self.fired(), (rows, 0)
        self._counted = (rows, self._counted[1] + 1)
        values, self._values = self._values, []
        ratios, self._ratios = self._ratios, []
        slots = self._slots.seal()
        self._turn += 1
        return MonitorBatch(
            self._clock.step,
            rows,
            slots,
            self.file,
            self._watchers,
            self._fault,
            values,
            ratios,
            self._summed,
        )

    def fired(self) -> Counter[str]:
        """Rows by kind, over all steps so far."""
        rows, times = self._counted
        return self._total + Counter({kind: n * times for kind, n in Counter(row.kind for row in rows).items()})

    def ledger(self) -> dict[str, Any]:
        """What fired, and what could not be measured or matched."""
        return {
            "unmatched": self.targets.unmatched(),
            "fired": dict(self.fired()),
            "unmeasured": self.unmeasured,
            "no_room": self._slots.dropped,
            "late": self.late,
            "kernel": self._measure.kernel,
        }

    # Rows of the last step, and where this one parts from it.

    def _measured(self, tensor: torch.Tensor) -> int:
        slot = self._slots.take()
        if slot >= 0 and not self._measure(tensor, slot):
            self.unmeasured += 1
            return -1
        return slot

    def _note(self, place: Place, tensor: torch.Tensor | None, microbatch: int | None, phase: str, slot: int) -> None:
        at = self._at
        shape, dtype = (tensor.shape, tensor.dtype) if tensor is not None else ((), None)
        if at < len(self._keys):
            known = self._keys[at]
            if (
                known[0] is place
                and known[4] == slot
                and known[1] == microbatch
                and known[2] == phase
                and known[5] is dtype
                and known[3] == shape
            ):
                self._at = at + 1
                return
        self._part_from(at)
        self._keys.append((place, microbatch, phase, shape, slot, dtype, len(self._rows)))
        self._add(place, tensor, microbatch, phase, slot)
        self._at = at + 1

    def _part_from(self, at: int) -> None:
        """From here on this step is not like the last: rows that were handed over stay as they are."""
        if at < len(self._keys):
            self._rows = self._rows[: self._keys[at][6]]
            del self._keys[at:]
        elif self._shared:
            self._rows = list(self._rows)
        self._shared = False

    def _add(self, place: Place, tensor: torch.Tensor | None, microbatch: int | None, phase: str, slot: int) -> None:
        layout = place.layout(tuple(tensor.shape) if tensor is not None else ())
        self._rows.append(
            Row(
                seq=len(self._rows),
                microbatch=microbatch,
                phase=phase,
                vpp=place.vpp,
                kind=place.kind,
                name=place.name,
                io=place.io,
                path=place.path,
                op=place.op,
                site=place.site,
                dtype="float64" if tensor is None else self._dtype_name(tensor.dtype),
                shape=layout.shape,
                global_shape=layout.whole,
                shard=layout.shard,
                numel=layout.numel,
                slot=slot,
                extra=place.extra,
            )
        )

    def _dtype_name(self, dtype: torch.dtype) -> str:
        if dtype not in self._dtypes:
            self._dtypes[dtype] = str(dtype).removeprefix("torch.")
        return self._dtypes[dtype]
