"""A place: everything about a tensor that is known before it is seen.

Sites make one for each tensor they watch and use it again at every call, so that a sighting costs no string work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from msprobe_megatron.topology.shards import ShardSpec

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """A tensor of one shape: shard text, global shape (None where there is none), its shape, elements.

    ``local`` is the shape of the whole local tensor, of which a sighting may show only a flat range.
    """

    shard: str
    whole: Shape | None
    shape: Shape
    numel: int
    spec: ShardSpec
    local: Shape


class Place:
    """Name and layout of a watched tensor.

    `spec` gives the shard spec for a local shape; its text and the global shape are worked out once a shape.
    `local_shape` is given where a sighting shows only a flat range of the local tensor, `extra` (JSON text) where every
    row of the place has more to say.

    Example::

        place = Place("activation", "decoder.layers.0", "output", "0", "TransformerLayer", 0, -1, spec, sizes.get)
        place.layout((16, 2, 64)).whole        # (32, 2, 64), of shard "s[cp:zigzag] b h"
    """

    __slots__ = (
        "_local_shape",
        "_size",
        "_spec",
        "extra",
        "io",
        "kind",
        "layouts",
        "name",
        "op",
        "path",
        "site",
        "vpp",
    )

    def __init__(
        self,
        kind: str,
        name: str,
        io: str,
        path: str,
        op: str,
        vpp: int,
        site: int,
        spec: Callable[[Shape], ShardSpec],
        size: Callable[[str], int],
        local_shape: Shape | None = None,
        extra: str | None = None,
    ) -> None:
        self.kind, self.name, self.io, self.path, self.op = kind, name, io, path, op
        self.vpp, self.site, self.extra = vpp, site, extra
        self._spec, self._size, self._local_shape = spec, size, local_shape
        self.layouts: dict[Shape, Layout] = {}

    def layout(self, shape: Shape) -> Layout:
        """What is known of a tensor of this local shape; worked out once a shape."""
        return self.layouts.get(shape) or self._new_layout(shape)

    def _new_layout(self, shape: Shape) -> Layout:
        spec = self._spec(shape).only(lambda axis: self._size(axis) > 1)
        whole = spec.global_shape(self._local_shape or shape, self._size)
        found = Layout(str(spec), whole, tuple(shape), math.prod(shape), spec, self._local_shape or tuple(shape))
        self.layouts[found.shape] = found
        return found
