"""What the training thread notes of a tensor: as little as possible. Rows are made of it in the writer thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
