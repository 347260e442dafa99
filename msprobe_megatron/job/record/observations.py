"""What the training thread notes about a tensor, kept minimal. The writer thread turns it into rows.

An `Observation` is the moment and the slot of one tensor; its name and shard come from the `Place` and `Layout` that it
shares with every other observation of the same spot of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, overload

import torch

from msprobe_megatron.run_directory.schema import Row
from msprobe_megatron.topology.shards import Layout, Place


class DtypeNames(dict[torch.dtype, str]):
    """Names of dtypes as rows have them; a lookup that hits runs no Python code.

    Example::

        >>> DtypeNames()[torch.bfloat16]
        'bfloat16'
    """

    def __missing__(self, dtype: torch.dtype) -> str:
        """Derive the name of a dtype on first use."""
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


class Observation(NamedTuple):
    """A tensor was observed: when, at which place, in which layout, and the slot of its statistics."""

    seq: int
    microbatch: int | None
    phase: str
    place: Place
    layout: Layout
    dtype: str
    slot: int
    extra: str | None = None
    tensor: str | None = None


_WIDTH = len(Observation._fields)


class Observations(Sequence[Observation]):
    """A sequence of observations, stored as one flat list of their cells.

    A tuple for each would be one more object for Python's garbage collector to traverse; a step of a large model has
    tens of thousands, and traversing them was a third of its cost.
    """

    __slots__ = ("_end", "add", "cells")

    def __init__(self) -> None:
        self.cells: list[Any] = []
        self._end: int | None = None
        self.add = self.cells.extend
        """Adds the cells of one observation in one atomic call."""

    def close(self) -> None:
        """End the step: cells that a late thread of the host adds from here on are ignored."""
        self._end = len(self.cells)

    def __len__(self) -> int:
        return (len(self.cells) if self._end is None else self._end) // _WIDTH

    @overload
    def __getitem__(self, index: int) -> Observation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Observation]: ...
    def __getitem__(self, index: int | slice) -> Observation | list[Observation]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Observation]:
        return map(Observation._make, zip(*[islice(self.cells, self._end)] * _WIDTH, strict=True))

    def __eq__(self, other: object) -> bool:
        # Equal cells are mostly the very same objects, which Python compares first.
        return isinstance(other, Observations) and self.cells == other.cells

    __hash__ = None  # type: ignore[assignment]

    def column(self, name: str) -> list[Any]:
        """The cells of this name, of all observations."""
        return self.cells[Observation._fields.index(name) : self._end : _WIDTH]

    def join_extra(self, texts: Mapping[int, str]) -> None:
        """Merge JSON objects, by slot, into the `extra` of their rows."""
        slot, extra = (Observation._fields.index(name) for name in ("slot", "extra"))
        for first in range(0, len(self) * _WIDTH, _WIDTH):
            text = texts.get(self.cells[first + slot])
            if text is not None:
                self.cells[first + extra] = joined(self.cells[first + extra], text)


def joined(first: str | None, second: str | None) -> str | None:
    """Merge two JSON objects, either of which may be missing."""
    if first is None or second is None:
        return first or second
    return f"{first[:-1]}, {second[1:]}"


def cells_of(seen: Sequence[Observation | Row]) -> dict[str, Sequence[Any]]:
    """The columns of rows, by their names."""
    if not isinstance(seen, Observations):
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
        "digest": nothing,
        "sketch": nothing,
    }


_OF_PLACE = ("vpp", "kind", "name", "io", "path", "op", "site")


def rows_of(seen: Sequence[Observation | Row]) -> list[Row]:
    """Convert observations to rows; rows are passed through."""
    return [one if isinstance(one, Row) else _row(one) for one in seen]


def _row(one: Observation) -> Row:
    place, layout = one.place, one.layout
    return Row(
        seq=one.seq,
        microbatch=one.microbatch,
        phase=one.phase,
        vpp=place.vpp,
        kind=place.kind,
        name=place.name,
        io=place.io,
        path=place.path,
        op=place.op,
        site=place.site,
        dtype=one.dtype,
        shape=layout.shape,
        global_shape=layout.whole,
        shard=layout.shard,
        numel=layout.numel,
        slot=one.slot,
        extra=one.extra,
        tensor=one.tensor,
    )
