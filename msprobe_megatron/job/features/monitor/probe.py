"""The monitor's probe: selects what is watched, measures it, and builds the batch of a step for the writer.

Steps of a training resemble each other. A row is built when a tensor is seen for the first time and reused as long as
the next steps see the same tensors in the same order; then an observation costs little more than measuring. At 5,000
rows per step, building them anew would take 13 ms instead of 4 of the training thread, and ten times the writer's time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from msprobe_megatron.config import MonitorConfig
from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.features.monitor.targets import Targets
from msprobe_megatron.job.measure.many import Many
from msprobe_megatron.job.measure.measurer import Measurer
from msprobe_megatron.job.measure.once import SeenTensors, key_of
from msprobe_megatron.job.record.monitor_files import MicrobatchSum, MonitorBatch, MonitorFile, PerRows, Watcher
from msprobe_megatron.job.record.observations import DtypeNames
from msprobe_megatron.job.record.slots import SlotTable
from msprobe_megatron.job.sites.sink import Reading
from msprobe_megatron.run_directory.schema import Row
from msprobe_megatron.topology.shards import Place

_WORTH_REMEMBERING = 1 << 14
"""Number of elements from which on measuring costs more than looking up that it was done."""
_Key = tuple[Any, ...]


class MonitorProbe:
    """Rows of statistics for the tensors that a `monitor` section selects."""

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
        self._dtypes = DtypeNames()
        self._summed = PerRows(MicrobatchSum) if config.microbatches == "summed" else None
        self._total: Counter[str] = Counter()
        self._counted: tuple[list[Row], int] = (self._rows, 0)
        self.file = MonitorFile(config.every)
        self.unmeasured = 0
        self.late = 0
        self._turn = 0  # even while a step is open, odd while it is being closed
        # Held from the check of the turn until the row is added: no step may end and no other thread add in between.
        self._noting = threading.RLock()

    # Selection, for the sites.

    def wants(self, name: str) -> bool:
        """True if a module of this name is watched; communication, which has names of its own, always is."""
        return "/" in name or (self._config.activations and self.targets.module(name))

    def wants_parameter(self, name: str) -> bool:
        """True if a parameter of this name is watched."""
        return self.targets.parameter(name)

    def wants_io(self, direction: str, io: str) -> bool:
        """True if inputs or outputs of forward or backward are watched."""
        return self._config.direction in ("both", direction)

    def wants_tensor(self, name: str, io: str, gradient: bool, position: int) -> bool:
        """True if the tensor at this position of a module's arguments or results is watched."""
        return self.targets.tensor(name, io, gradient, position)

    # Observations, from the sites.

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
        """A thread of the host was still running when the step ended: its slot may have a new owner."""
        self.late += 1
        self._slots.invalidate(slot)

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
        self._diverge_at(at)
        self._keys.append((reading, None, reading.phase, None, first, None, len(self._rows)))
        for place, tensor, slot in zip(reading.places, tensors, slots, strict=True):
            self._add(place, tensor, None, reading.phase, slot)
        self._at = at + 1

    def value(self, place: Place, number: float, microbatch: int | None = None) -> int:
        """Record a number that the host knows; returns its slot."""
        slot = self._slots.take()
        if slot >= 0:
            self._values.append((slot, float(number)))
        with self._noting:
            self._note(place, None, microbatch, "optimizer", slot)
        return slot

    def ratio(self, place: Place, above: int, below: int) -> None:
        """Record the norm of one slot over that of another; computed when the statistics are on the host."""
        slot = self._slots.take()
        if slot >= 0 and above >= 0 and below >= 0:
            self._ratios.append((slot, above, below))
        with self._noting:
            self._note(place, None, None, "optimizer", slot)

    def memory_changed(self) -> None:
        """Memory was written without a change of version counters: measure everything anew."""
        if len(self._seen):
            self._seen.invalidate()

    def finish(self) -> MonitorBatch:
        """Return the batch of the step; the probe is ready for the next one."""
        with self._noting:  # a thread that is adding a row finishes it first; later ones come too late
            self._turn += 1
        if self._at < len(self._keys):
            self._diverge_at(self._at)
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
        """What was observed, and what could not be measured or matched."""
        return {
            "unmatched": self.targets.unmatched(),
            "fired": dict(self.fired()),
            "unmeasured": self.unmeasured,
            "no_room": self._slots.dropped,
            "late": self.late,
            "kernel": self._measure.kernel,
        }

    # The rows of the last step, and where this one diverges from it.

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
        self._diverge_at(at)
        self._keys.append((place, microbatch, phase, shape, slot, dtype, len(self._rows)))
        self._add(place, tensor, microbatch, phase, slot)
        self._at = at + 1

    def _diverge_at(self, at: int) -> None:
        """From here on this step differs from the last: rows that were submitted stay unchanged."""
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
                dtype="float64" if tensor is None else self._dtypes[tensor.dtype],
                shape=layout.shape,
                global_shape=layout.whole,
                shard=layout.shard,
                numel=layout.numel,
                slot=slot,
                extra=place.extra,
            )
        )
