"""The dump's probe: selects which tensors get a row, measures each once, and builds the batch of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from msprobe_megatron.config import DumpConfig
from msprobe_megatron.config.name_patterns import name_matcher
from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.measure.hashes import raw_bytes
from msprobe_megatron.job.measure.measurer import Measurer
from msprobe_megatron.job.measure.once import SeenTensors, key_of
from msprobe_megatron.job.measure.operator import number_of
from msprobe_megatron.job.record.hash_packs import Hashes, HashPacks
from msprobe_megatron.job.record.observations import DtypeNames, Observations, joined
from msprobe_megatron.job.record.slots import SlotTable
from msprobe_megatron.job.record.step_files import RecordsFile, SitesFile, StepBatch
from msprobe_megatron.job.record.tensors import TensorPacks
from msprobe_megatron.job.sites.compiled.bindings import (
    NO_ROOM,
    UNSUPPORTED,
    RowWriter,
    TensorCache,
    row_writer,
    tensor_caches,
)
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.index_map import Numbering, index_map
from msprobe_megatron.topology.layers import layer_of
from msprobe_megatron.topology.shards import Layout, Place

_KIND = attrgetter("kind")
_LOCAL = '{"digest": "local"}'  # numbered within the shard: such a digest does not add up with others


def _unsupported(tensor: torch.Tensor) -> int:
    return UNSUPPORTED


class _Page:
    """Per-step buffers. Each step gets its own, so that a late thread cannot write into the next step."""

    __slots__ = ("add", "cached", "cached_weight", "caches", "hashed", "hashes", "rows", "saved", "seen", "weights")

    def __init__(self, new_cache: Callable[[], TensorCache] | None = None, numbered: bool = False) -> None:
        self.rows = Observations()
        self.add = self.rows.add
        self.seen = SeenTensors()
        self.weights = SeenTensors()  # changed by the optimizer only: measured and saved once per step
        # The compiled equivalent of both, for tensors it supports; only the row writer knows element numbers.
        self.caches = (new_cache(), new_cache()) if new_cache is not None else None
        simple = self.caches if not numbered else None
        self.cached: Callable[[torch.Tensor], int] = simple[0].see if simple else _unsupported
        self.cached_weight: Callable[[torch.Tensor], int] = simple[1].see if simple else _unsupported
        self.hashes: Hashes = {}
        self.hashed: set[int] = set()
        self.saved: dict[int | None, str] = {}


class DumpProbe:
    """Rows of statistics for the tensors that a `dump` section selects."""

    def __init__(
        self,
        config: DumpConfig,
        clock: Clock,
        slots: SlotTable,
        where: Coordinates | None = None,
        packs: TensorPacks | None = None,
        hash_packs: HashPacks | None = None,
        *,
        once: bool = True,
    ) -> None:
        # Without gradients Megatron adds residuals in place and hides it from version counters (a new tensor on the
        # same memory): what was seen a moment ago may hold other numbers, so that `once` is off there.
        self._once = once
        self._config, self._clock, self._slots, self._where = config, clock, slots, where or Coordinates()
        self._matchers = {text: name_matcher(text) for text in config.list}
        self._numbered = config.digest is True or config.sketch > 0
        self._measure = Measurer(slots, digest=config.digest is True, sketch=config.sketch)
        # Token ids, labels, masks and positions always have a digest: it says whether the data differ.
        self._digests_integers = slots.has_digests and not self._numbered
        self._measure_integers = Measurer(slots, digest=True) if self._digests_integers else self._measure
        self._new_cache = tensor_caches(self._measure, slots) if once else None
        self._numberings: dict[int, tuple[Numbering | None, str | None, Layout]] = {}
        self._hash = hash_packs
        self._measures = config.task != "structure"
        self._small = packs
        self._packs = packs if config.task == "tensor" or config.tensor_list else None
        self._kept = [name_matcher(text) for text in config.tensor_list]
        self._keeps: dict[str, bool] = {}
        # Statistics only, the common case: `see` then skips everything else.
        self._plain = self._measures and not self._numbered and self._hash is None and self._packs is None
        self._microbatches = config.microbatches
        self._sites_file = SitesFile()
        self._records_file = RecordsFile()
        self._dtypes = DtypeNames()
        self._row_writer: RowWriter | None = None
        whole = self._measures and self._hash is None and self._packs is None
        # A subclass that overrides `see` keeps its override.
        if self._new_cache is not None and whole and self._microbatches is None and type(self).see is _SEE:
            self._row_writer = row_writer(clock, self._describe, self.see, self._too_late)
            self.see = self._row_writer  # type: ignore[method-assign, assignment]
        self._page = self._new_page()
        self.matched: set[str] = set()
        self.fired: Counter[str] = Counter()
        self.unmeasured = 0
        self.late = 0

    def wants(self, name: str) -> bool:
        """True if `list` and `layers` select a module or parameter of this name."""
        layers = self._config.layers
        if layers is not None and (layer := layer_of(name)) is not None and layer not in layers:
            return False
        hits = [text for text, matches in self._matchers.items() if matches(name)]
        self.matched.update(hits)
        return bool(hits) or not self._matchers

    def wants_io(self, direction: str, io: str) -> bool:
        """True if `data_mode` selects the inputs or outputs of forward or backward."""
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

        The fallback for tensors that the compiled row writer does not support.
        """
        page = self._page
        chosen = self._microbatches
        if chosen is not None and microbatch is not None and microbatch not in chosen:
            return
        shape = tensor.shape
        layout = place.layouts.get(shape) or place.layout(shape)
        if self._plain and not (self._digests_integers and _is_integer(tensor)):
            slot = page.cached_weight(tensor) if tensor.__class__ is nn.Parameter else page.cached(tensor)
            if slot == UNSUPPORTED:
                slot = self._slot_of(tensor, None, page)
            extra, key = place.extra, None
        else:
            slot, extra, key = self._in_full(place, layout, tensor, page)
        if slot == NO_ROOM:
            return
        clock = self._clock
        seq = clock.seq
        clock.seq = seq + 1
        name = self._dtypes[tensor.dtype]
        if page is not self._page:
            self._too_late(slot)
            return
        page.add((seq, microbatch, phase, place, layout, name, slot, extra, key))

    def keep(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Save a small tensor whole, whatever the task, and write a row without statistics that points to it."""
        page, chosen, clock = self._page, self._microbatches, self._clock
        if self._small is None or (chosen is not None and microbatch is not None and microbatch not in chosen):
            return
        key = self._small.add(clock.step, tensor)
        layout, name = place.layout(tensor.shape), self._dtypes[tensor.dtype]
        seq = clock.tick()
        if page is not self._page:
            self.late += 1
            return
        page.add((seq, microbatch, phase, place, layout, name, -1, place.extra, key))

    def _too_late(self, slot: int) -> None:
        """A thread of the host was still running when the step ended: its slot may have a new owner."""
        self.late += 1
        self._slots.invalidate(slot)

    def _new_page(self) -> _Page:
        page = _Page(self._new_cache, self._numbered)
        if self._row_writer is not None and page.caches is not None:
            self._row_writer.new_page(*page.caches, page.rows.cells)
        return page

    def _describe(self, place: Place, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """The cells shared by all rows of a place, for the row writer; None for a tensor it does not support."""
        layout = place.layout(tensor.shape)
        name = self._dtypes[tensor.dtype]
        measure = self._measure_integers if _is_integer(tensor) else self._measure
        if measure.cells < 0:
            return layout, name, place.extra, 0, measure.cells, 0, None
        numbering, extra = self._numbers(layout)
        extra, number = joined(place.extra, extra), number_of(numbering)
        if measure.compiled is None:  # on a device
            return layout, name, extra, number, measure.cells, 0, numbering
        if measure.compiled.readable(tensor) is None:
            return None
        plan = measure.compiled.plan(tensor, numbering)
        return layout, name, extra, number, measure.cells, plan.address, plan

    def _in_full(
        self, place: Place, layout: Layout, tensor: torch.Tensor, page: _Page
    ) -> tuple[int, str | None, str | None]:
        """Slot, extra, and key of the saved tensor, for everything beyond plain statistics."""
        integer = self._digests_integers and _is_integer(tensor)
        numbering, extra = self._numbers(layout) if self._numbered or integer else (None, None)
        slot = UNSUPPORTED if integer and self._measures else -1
        if self._measures:
            if not integer:
                slot = page.cached_weight(tensor) if tensor.__class__ is nn.Parameter else page.cached(tensor)
            if slot == UNSUPPORTED:
                slot = self._slot_of(tensor, numbering, page)
            if self._packs is not None and slot >= 0 and slot not in page.saved:
                self._save(place.name, tensor, slot, page)
            if self._hash is not None and slot >= 0 and slot not in page.hashed:
                page.hashed.add(slot)
                self._hash.add(page.hashes, slot, raw_bytes(tensor))
        return slot, joined(place.extra, extra), page.saved.get(slot) if self._packs is not None else None

    def _numbers(self, layout: Layout) -> tuple[Numbering | None, str | None]:
        """Numbering of the elements, and a mark for the row if it is that of the shard only."""
        found = self._numberings.get(id(layout))
        if found is None:
            numbering = index_map(layout.spec, layout.local, self._where.of, self._where.size)
            found = (numbering, None if numbering is not None else _LOCAL, layout)
            self._numberings[id(layout)] = found
        return found[:2]

    def _slot_of(self, tensor: torch.Tensor, numbering: Numbering | None, page: _Page) -> int:
        """The slot of a tensor that the compiled cache does not support, or where there is no compiled cache."""
        key = key_of(tensor, number_of(numbering))
        weight = tensor.__class__ is nn.Parameter
        seen = page.weights if weight else page.seen
        slot = seen.get(key) if self._once or weight else None
        if slot is not None:
            return slot
        slot = self._slots.take()
        if slot < 0:
            return NO_ROOM  # counted by the table; a row would exceed the memory limit too
        measure = self._measure_integers if _is_integer(tensor) else self._measure
        if measure(tensor, slot, numbering):
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

    def ledger(self) -> dict[str, Any]:
        """What was observed, and what could not be measured or matched."""
        return {
            "unmatched": self.unmatched(),
            "fired": dict(self.fired),
            "unmeasured": self.unmeasured,
            "no_room": self._slots.dropped,
            "late": self.late,
            "kernel": self._measure.kernel,
            "look": "python" if self._new_cache is None else "compiled",
        }

    def memory_changed(self) -> None:
        """Memory was written without a change of version counters: measure everything anew."""
        page = self._page
        if page.seen:
            page.seen.invalidate()
        if page.caches is not None:
            page.caches[0].forget_all()

    def finish(self, complete: bool, sites: dict[str, Any]) -> StepBatch:
        """Return the batch of the step; the probe is empty again."""
        # A throwaway page while the slots are sealed: a thread that is still running takes a slot of this step or of
        # the next, and no row of either may refer to it.
        if self._row_writer is not None:
            self._row_writer.new_page()
        page, self._page = self._page, (throwaway := _Page())
        slots = self._slots.seal()
        self._page = self._new_page()
        self.late += len(throwaway.rows)
        for slot in throwaway.rows.column("slot"):
            self._slots.invalidate(slot)
        rows = page.rows
        rows.close()
        self.fired.update(map(_KIND, rows.column("place")))
        for packs in (self._small, self._hash):
            if packs is not None:
                packs.finish()
        only = self._config.task == "nonfinite"
        files = (self._sites_file, self._records_file)
        return StepBatch(self._clock.step, rows, slots, sites, complete, only, *files, page.hashes)


_SEE = DumpProbe.see


def _is_integer(tensor: torch.Tensor) -> bool:
    """Whether the elements are integers or booleans, which are few and exact."""
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex)
