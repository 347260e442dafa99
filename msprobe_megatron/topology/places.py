"""A place: everything about a tensor that is known before it is seen.

Sites make one for each tensor they watch and use it again at every call, so that a sighting costs no string work.
"""

from __future__ import annotations

from collections.abc import Callable

from msprobe_megatron.topology.shards import ShardSpec

Shape = tuple[int, ...]


class Place:
    """Name and layout of a watched tensor.

    `spec` gives the shard spec for a local shape; its text and the global shape are worked out once a shape.
    `local_shape` is given where a sighting shows only a flat range of the local tensor.

    Example::

        place = Place("activation", "decoder.layers.0", "output", "0", "TransformerLayer", 0, -1, spec, sizes.get)
        place.layout((16, 2, 64))        # ("s[cp:zigzag] b h", (32, 2, 64))
    """

    __slots__ = (
        "_layouts",
        "_local_shape",
        "_size",
        "_spec",
        "io",
        "kind",
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
    ) -> None:
        self.kind, self.name, self.io, self.path, self.op = kind, name, io, path, op
        self.vpp, self.site = vpp, site
        self._spec, self._size, self._local_shape = spec, size, local_shape
        self._layouts: dict[Shape, tuple[str, Shape | None]] = {}

    def layout(self, shape: Shape) -> tuple[str, Shape | None]:
        """Shard text and global shape for a local shape."""
        found = self._layouts.get(shape)
        if found is None:
            spec = self._spec(shape).only(lambda axis: self._size(axis) > 1)
            found = (str(spec), spec.global_shape(self._local_shape or shape, self._size))
            self._layouts[shape] = found
        return found
