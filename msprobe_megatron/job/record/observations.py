"""What the training thread notes of a tensor: as little as possible. Rows are made of it in the writer thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, overload

from msprobe_megatron.record.schema import Row
from msprobe_megatron.topology.places import Layout, Place


class Sighting(NamedTuple):
    """A tensor was seen: when, at which place, in which layout, and the slot where its figures are."""

    seq: int
    microbatch: int | None
    phase: str
    place: Place
    layout: Layout
    dtype: str
    slot: int
    extra: str | None = None
    tensor: str | None = None


_WIDTH = len(Sighting._fields)


class Sightings(Sequence[Sighting]):
    """Sightings, one after the other, as one flat list of their cells.

    A tuple for each would be one more object for Python's garbage collector to visit again and again; of a step of a
    large model there are tens of thousands, and their visits were a third of its cost.

    Example::

        seen = Sightings()
        seen.add((0, 0, "forward", place, layout, "float32", 7, None, None))
        seen[0].slot        # 7
    """

    __slots__ = ("_end", "add", "cells")

    def __init__(self) -> None:
        self.cells: list[Any] = []
        self._end: int | None = None
        self.add = self.cells.extend
        """Takes the cells of one sighting, all at once: threads do not come in between."""

    def close(self) -> None:
        """What a thread of the host adds from here on is not of this step, and nobody sees it."""
        self._end = len(self.cells)

    def __len__(self) -> int:
        return (len(self.cells) if self._end is None else self._end) // _WIDTH

    @overload
    def __getitem__(self, index: int) -> Sighting: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sighting]: ...
    def __getitem__(self, index: int | slice) -> Sighting | list[Sighting]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Sighting]:
        return map(Sighting._make, zip(*[islice(self.cells, self._end)] * _WIDTH, strict=True))

    def __eq__(self, other: object) -> bool:
        # Equal cells are mostly the very same objects, which Python compares first.
        return isinstance(other, Sightings) and self.cells == other.cells

    __hash__ = None  # type: ignore[assignment]

    def column(self, name: str) -> list[Any]:
        """The cells of this name, of all sightings.

        Example: ``seen.column("slot")``.
        """
        return self.cells[Sighting._fields.index(name) : self._end : _WIDTH]


def cells_of(seen: Sequence[Sighting | Row]) -> dict[str, Sequence[Any]]:
    """The columns of rows, by their names.

    Example::

        cells_of(seen)["name"]
    """
    if not isinstance(seen, Sightings):
        return dict(zip(Row._fields, zip(*rows_of(seen), strict=True), strict=True))
    places: list[Place] = seen.column("place")
    layouts: list[Layout] = seen.column("layout")
    nothing = [None] * len(places)
    return {
        **{name: seen.column(name) for name in ("seq", "microbatch", "phase", "dtype", "slot", "extra", "tensor")},
        **{name: [getattr(place, name) for place in places] for name in _OF_PLACE},
        "shape": [layout.shape for layout in layouts],
        "global_shape": [layout.whole for layout in layouts],
        "shard": [layout.shard for layout in layouts],
        "numel": [layout.numel for layout in layouts],
        **{"digest": nothing, "sketch": nothing},
    }


_OF_PLACE = ("vpp", "kind", "name", "io", "path", "op", "site")


def rows_of(seen: Sequence[Sighting | Row]) -> list[Row]:
    """Rows, of sightings or as they are.

    Example::

        rows_of([Sighting(0, 0, "forward", place, layout, "float32", 7)])[0].name
    """
    return [one if isinstance(one, Row) else _row(one) for one in seen]


def _row(one: Sighting) -> Row:
    place, layout = one.place, one.layout
    return Row(
        *(one.seq, one.microbatch, one.phase, place.vpp, place.kind, place.name, place.io, place.path, place.op),
        *(place.site, one.dtype, layout.shape, layout.whole, layout.shard, layout.numel, one.slot, one.extra),
        tensor=one.tensor,
    )
