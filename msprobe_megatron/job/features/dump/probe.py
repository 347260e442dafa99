"""Probe: dump. Decides which tensors get a row, measures each once, and hands a step's rows to the writer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from msprobe_megatron.clock import Clock
from msprobe_megatron.config import DumpConfig
from msprobe_megatron.measure.hashes import HASHES
from msprobe_megatron.measure.looks import NO_ROOM, NOT_MINE, Look, Pen, looks, pen
from msprobe_megatron.measure.measurer import Measurer
from msprobe_megatron.measure.once import SeenTensors, key_of
from msprobe_megatron.record.batches import SitesFile, StepBatch
from msprobe_megatron.record.records_file import RecordsFile
from msprobe_megatron.record.sightings import Sightings
from msprobe_megatron.record.slots import SlotTable
from msprobe_megatron.record.tensors import TensorPacks
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.index_map import Numbering, index_map
from msprobe_megatron.topology.layers import layer_of
from msprobe_megatron.topology.places import Layout, Place

_KIND = attrgetter("kind")
_LOCAL = '{"digest": "local"}'  # numbered within the shard: such a digest does not add up with others


def _not_mine(tensor: torch.Tensor) -> int:
    return NOT_MINE


class _Page:
    """What one step fills. A new one for each, so that a thread that outlives a step writes to nobody's."""

    __slots__ = ("add", "hashes", "look", "look_weights", "looks", "rows", "saved", "seen", "weights")

    def __init__(self, new_look: Callable[[], Look] | None = None, numbered: bool = False) -> None:
        self.rows = Sightings()
        self.add = self.rows.add
        self.seen = SeenTensors()
        self.weights = SeenTensors()  # nothing but the optimizer changes them: measured and saved once a step
        # The same two in one compiled call, for what it can read; numbers of elements are known to a pen only.
        self.looks = (new_look(), new_look()) if new_look is not None else None
        simple = self.looks if not numbered else None
        self.look: Callable[[torch.Tensor], int] = simple[0].see if simple else _not_mine
        self.look_weights: Callable[[torch.Tensor], int] = simple[1].see if simple else _not_mine
        self.hashes: dict[int, str] = {}
        self.saved: dict[int | None, str] = {}


class DumpProbe:
    """Rows of statistics for what the `dump` section of the probe file asks.

    Example::

        probe = DumpProbe(config.dump, clock, slots)
        probe.see(place, tensor, microbatch=0, phase="forward")
        writer.submit(probe.finish(complete=True, sites={}))
    """

    def __init__(
        self,
        config: DumpConfig,
        clock: Clock,
        slots: SlotTable,
        where: Coordinates | None = None,
        packs: TensorPacks | None = None,
    ) -> None:
        self._config, self._clock, self._slots, self._where = config, clock, slots, where or Coordinates()
        self._matchers = {text: _matcher(text) for text in config.list}
        self._numbered = config.digest is True or config.sketch > 0
        self._measure = Measurer(slots, digest=config.digest is True, sketch=config.sketch)
        self._looks = looks(self._measure, slots)
        self._numberings: dict[int, tuple[Numbering | None, str | None, Layout]] = {}
        self._hash = HASHES.get(config.digest) if isinstance(config.digest, str) else None
        self._measures = config.task != "structure"
        self._packs = packs if config.task == "tensor" or config.tensor_list else None
        self._kept = [_matcher(text) for text in config.tensor_list]
        self._keeps: dict[str, bool] = {}
        # Statistics alone, which is what is asked most: all else is passed by.
        self._plain = self._measures and not self._numbered and self._hash is None and self._packs is None
        self._microbatches = config.microbatches
        self._sites_file = SitesFile()
        self._records_file = RecordsFile()
        self._dtypes: dict[torch.dtype, str] = {}
        self._pen: Pen | None = None
        whole = self._measures and self._hash is None and self._packs is None
        # Who has a `see` of another kind keeps it.
        if self._looks is not None and whole and self._microbatches is None and type(self).see is _SEE:
            self._pen = pen(clock, self._describe, self.see, self._too_late, numbered=self._numbered)
            self.see = self._pen  # type: ignore[method-assign, assignment]
        self._page = self._new_page()
        self.matched: set[str] = set()
        self.fired: Counter[str] = Counter()
        self.unmeasured = 0
        self.late = 0

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
        """Measure a tensor, unless it was measured a moment ago, and write its row.

        A pen stands before it where there is one; this is for what the pen does not take.
        """
        page = self._page
        chosen = self._microbatches
        if chosen is not None and microbatch is not None and microbatch not in chosen:
            return
        shape = tensor.shape
        layout = place.layouts.get(shape) or place.layout(shape)
        if self._plain:
            slot = page.look_weights(tensor) if tensor.__class__ is nn.Parameter else page.look(tensor)
            if slot == NOT_MINE:
                slot = self._looked(tensor, None, page)
            extra, key = place.extra, None
        else:
            slot, extra, key = self._in_full(place, layout, tensor, page)
        if slot == NO_ROOM:
            return
        clock = self._clock
        seq = clock.seq
        clock.seq = seq + 1
        dtype = tensor.dtype
        name = self._dtypes.get(dtype) or self._dtype_name(dtype)
        if page is not self._page:
            self._too_late(slot)
            return
        page.add((seq, microbatch, phase, place, layout, name, slot, extra, key))

    def _too_late(self, slot: int) -> None:
        """A thread of the host went on while the step ended: nobody knows whose its slot is."""
        self.late += 1
        self._slots.spoil(slot)

    def _new_page(self) -> _Page:
        page = _Page(self._looks, self._numbered)
        if self._pen is not None and page.looks is not None:
            self._pen.turn(*page.looks, page.rows.cells)
        return page

    def _describe(self, place: Place, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """What the rows of a place have in common, for the pen; None for a tensor that it cannot take."""
        layout = place.layout(tensor.shape)
        name = self._dtypes.get(tensor.dtype) or self._dtype_name(tensor.dtype)
        if not self._numbered:
            return layout, name, place.extra, 0, 0, None
        compiled = self._measure.compiled
        if compiled is None or compiled.readable(tensor) is None:
            return None
        numbering, extra = self._numbers(layout)
        plan = compiled.plan(tensor, numbering)
        return layout, name, _joined(place.extra, extra), id(numbering) if numbering else 0, plan.address, plan

    def _in_full(
        self, place: Place, layout: Layout, tensor: torch.Tensor, page: _Page
    ) -> tuple[int, str | None, str | None]:
        """Slot, extra, and key of the saved tensor, for whatever is asked besides statistics or instead of them."""
        numbering, extra = self._numbers(layout) if self._numbered else (None, None)
        slot = -1
        if self._measures:
            slot = page.look_weights(tensor) if tensor.__class__ is nn.Parameter else page.look(tensor)
            if slot == NOT_MINE:
                slot = self._looked(tensor, numbering, page)
            if self._packs is not None and slot >= 0 and slot not in page.saved:
                self._save(place.name, tensor, slot, page)
            if self._hash is not None:
                extra = self._hashed(tensor, slot, page)
        return slot, _joined(place.extra, extra), page.saved.get(slot) if self._packs is not None else None

    def _numbers(self, layout: Layout) -> tuple[Numbering | None, str | None]:
        """Numbering of the elements, and a mark for the row when it is not that of the whole tensor."""
        found = self._numberings.get(id(layout))
        if found is None:
            numbering = index_map(layout.spec, layout.local, self._where.of, self._where.size)
            found = (numbering, None if numbering is not None else _LOCAL, layout)
            self._numberings[id(layout)] = found
        return found[:2]

    def _hashed(self, tensor: torch.Tensor, slot: int, page: _Page) -> str | None:
        if slot < 0 or self._hash is None:
            return None
        text = page.hashes.get(slot)
        if text is None:
            text = page.hashes[slot] = json.dumps({self._config.digest: self._hash(tensor)})
        return text

    def _looked(self, tensor: torch.Tensor, numbering: Numbering | None, page: _Page) -> int:
        """The slot of a tensor that the compiled look does not take, or where there is none."""
        key = key_of(tensor, numbering and id(numbering))
        seen = page.weights if tensor.__class__ is nn.Parameter else page.seen
        slot = seen.get(key)
        if slot is not None:
            return slot
        slot = self._slots.take()
        if slot < 0:
            return NO_ROOM  # counted by the table; a row would take memory that the limit does not allow
        if self._measure(tensor, slot, numbering):
            seen.put(key, tensor, slot)
            return slot
        self.unmeasured += 1
        return -1

    def _save(self, name: str, tensor: torch.Tensor, slot: int, page: _Page) -> None:
        """Put a copy into the pack: of all tensors, or of those whose names are in `tensor_list`."""
        keep = not self._kept
        if not keep:
            keep = self._keeps.get(name, False) if name in self._keeps else any(match(name) for match in self._kept)
            self._keeps[name] = keep
        if keep and self._packs is not None:
            page.saved[slot] = self._packs.add(self._clock.step, tensor)

    def _dtype_name(self, dtype: torch.dtype) -> str:
        name = self._dtypes[dtype] = str(dtype).removeprefix("torch.")
        return name

    def ledger(self) -> dict[str, Any]:
        """What fired, and what could not be measured or matched."""
        return {
            "unmatched": self.unmatched(),
            "fired": dict(self.fired),
            "unmeasured": self.unmeasured,
            "no_room": self._slots.dropped,
            "late": self.late,
            "kernel": self._measure.kernel,
            "look": "python" if self._looks is None else "compiled",
        }

    def memory_changed(self) -> None:
        """Something was written that version counters do not tell of: measure everything anew."""
        page = self._page
        if page.seen:
            page.seen.invalidate()
        if page.looks is not None:
            page.looks[0].forget_all()

    def finish(self, complete: bool, sites: dict[str, Any]) -> StepBatch:
        """The step's rows, ready for the writer; the probe is empty again."""
        # A page for nobody while the slots are sealed: a thread that goes on now takes a slot of this step or of the
        # next, and no row of either may name it.
        if self._pen is not None:
            self._pen.turn()
        page, self._page = self._page, (nobodys := _Page())
        slots = self._slots.seal()
        self._page = self._new_page()
        self.late += len(nobodys.rows)
        for slot in nobodys.rows.column("slot"):
            self._slots.spoil(slot)
        rows = page.rows
        rows.close()
        self.fired.update(map(_KIND, rows.column("place")))
        if self._packs is not None:
            self._packs.finish()
        only = self._config.task == "nonfinite"
        return StepBatch(self._clock.step, rows, slots, sites, complete, only, self._sites_file, self._records_file)


_SEE = DumpProbe.see


def _joined(first: str | None, second: str | None) -> str | None:
    """One JSON object of two, either of which may be missing."""
    if first is None or second is None:
        return first or second
    return f"{first[:-1]}, {second[1:]}"


def _matcher(text: str) -> Callable[[str], bool]:
    """`/regex/` searches, anything else is a substring."""
    if len(text) > 2 and text.startswith("/") and text.endswith("/"):
        pattern = re.compile(text[1:-1])
        return lambda name: pattern.search(name) is not None
    return lambda name: text in name
