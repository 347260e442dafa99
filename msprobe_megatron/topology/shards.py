"""Shard specs, and places.

A spec says which part of the whole tensor a rank holds, as a short text that rows carry. The text names the dimensions
and, in brackets, the axes that shard them, outermost first::

    s[cp:zigzag,tp] b[dp:samples] h        sequence over CP in zig-zag, then over TP; batch over DP
    d0[tp:gated] d1                        gated fc1: every rank holds [gate part; up part]
    d0[tp:packed 128,128,16] d1            several tensors in one, each cut over TP; their sizes, or any in proportion
    s[cp:zigzag 1,1] b h                   two tensors in one, each in zig-zag
    s b n[tp:groups 2] d                   cut into 2 parts, each held by neighbouring ranks (fewer groups than TP)
    d0[tp] d1; flat 128:256                of the TP shard, elements 128 to 255 in row-major order (optimizer shard)
    d0; partial tp                         the sum over TP is the whole
    ?reason                                cannot be merged, and why

An axis that is not named holds replicas. Pure functions: no Megatron and no communication here.

A place is everything about an observed tensor that does not change between calls: name, role, spec. Sites create one
for each tensor they observe and reuse it at every call, so that an observation does no string work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # readers of run directories need specs, not torch
    import torch


ORDERS = ("contiguous", "zigzag", "gated", "samples", "unordered")
NUMBERED = ("packed", "zigzag", "groups")
"""Orders that are followed by numbers."""
_DIM = re.compile(r"([A-Za-z0-9_*]+)(?:\[([^\]]+)\])?$")
_WORD = re.compile(r"[^\s\[]+\[[^\]]*\]\S*|\S+")
_CUT_END = re.compile(r",(?=\s*[A-Za-z])")
_FLAT = re.compile(r"flat (\d+):(\d+)$")


@dataclass(frozen=True)
class Cut:
    """Sharding of a dimension over one axis; `numbers` are the sizes of packed tensors, or the number of groups."""

    axis: str
    order: str = "contiguous"
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.numbers:
            return f"{self.axis}:{self.order} {','.join(map(str, self.numbers))}"
        return self.axis if self.order == "contiguous" else f"{self.axis}:{self.order}"

    def parts(self, size: int) -> int:
        """Number of different parts that `size` ranks hold."""
        if self.order == "samples":
            return 1
        return min(self.numbers[0], size) if self.order == "groups" else size

    def part(self, rank: int, size: int) -> int:
        """Which of these parts a rank holds.

        Example::

            >>> [Cut("tp", "groups", (2,)).part(rank, 4) for rank in range(4)]
            [0, 0, 1, 1]
        """
        return rank * self.parts(size) // size

    def pieces(self, extent: int) -> list[int]:
        """Extents of the tensors that a dimension of this extent holds one after the other, each cut for itself."""
        sizes = {"gated": (1, 1), "groups": (1,)}.get(self.order, self.numbers or (1,))
        if any(extent * one % sum(sizes) for one in sizes):
            raise ValueError(f"a dimension of {extent} cannot be divided in the proportions of {self}")
        return [extent * one // sum(sizes) for one in sizes]


@dataclass(frozen=True)
class Dim:
    """A dimension: its letter and the axes that shard it."""

    name: str
    cuts: tuple[Cut, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.cuts))}]" if self.cuts else self.name


@dataclass(frozen=True)
class ShardSpec:
    """The position of a local tensor in the whole one.

    Example::

        >>> spec = ShardSpec.parse("s[cp:zigzag,tp] b h")
        >>> spec.global_shape((4, 2, 8), {"cp": 2, "tp": 2}.get)
        (16, 2, 8)
    """

    dims: tuple[Dim, ...] = ()
    flat: tuple[int, int] | None = None
    partial: tuple[str, ...] = ()
    unknown: str | None = None

    @classmethod
    def unmergeable(cls, reason: str) -> ShardSpec:
        """Spec of a tensor whose position in the whole is not known; the reason is shown to the user."""
        return cls(unknown=reason)

    @classmethod
    def parse(cls, text: str) -> ShardSpec:
        """Read the text form; raises ValueError that quotes the part at fault."""
        if text.startswith("?"):
            return cls(unknown=text[1:])
        head, *clauses = [part.strip() for part in text.split(";")]
        spec = cls(dims=tuple(_parse_dim(word) for word in words(head)))
        for clause in clauses:
            flat = _FLAT.match(clause)
            if flat:
                spec = replace(spec, flat=(int(flat[1]), int(flat[2])))
            elif clause.startswith("partial "):
                spec = replace(spec, partial=tuple(clause.split()[1:]))
            else:
                raise ValueError(f"shard spec {text!r}: cannot read {clause!r}; accepted: 'flat A:B', 'partial AXIS'")
        return spec

    def __str__(self) -> str:
        if self.unknown is not None:
            return f"?{self.unknown}"
        parts = [" ".join(map(str, self.dims))]
        if self.flat is not None:
            parts.append(f"flat {self.flat[0]}:{self.flat[1]}")
        if self.partial:
            parts.append("partial " + " ".join(self.partial))
        return "; ".join(parts)

    def cut_axes(self) -> tuple[str, ...]:
        """Axes on which ranks hold different parts."""
        axes = [cut.axis for dim in self.dims for cut in dim.cuts]
        return tuple(dict.fromkeys([*axes, *self.partial]))

    def only(self, used: Callable[[str], bool]) -> ShardSpec:
        """The spec without the axes that this job does not use, so that rows stay readable."""
        dims = tuple(Dim(d.name, tuple(c for c in d.cuts if used(c.axis))) for d in self.dims)
        return replace(self, dims=dims, partial=tuple(a for a in self.partial if used(a)))

    def global_shape(self, shape: Sequence[int], size: Callable[[str], int | None]) -> tuple[int, ...] | None:
        """Shape of the whole tensor of one microbatch, or None where it is not a product of sizes."""
        if self.unknown is not None or len(shape) != len(self.dims):
            return None
        whole = []
        for extent, dim in zip(shape, self.dims, strict=True):
            if any(cut.order == "unordered" for cut in dim.cuts):
                return None
            whole.append(int(extent) * math.prod(cut.parts(size(cut.axis) or 1) for cut in dim.cuts))
        return tuple(whole)


def _parse_dim(word: str) -> Dim:
    match = _DIM.match(word)
    if not match:
        raise ValueError(f"shard spec: cannot read dimension {word!r}; accepted: name or name[axis:order,...]")
    try:
        return Dim(match[1], tuple(parse_cut(item) for item in _CUT_END.split(match[2] or "") if item))
    except ValueError as fault:
        raise ValueError(f"shard spec: {word!r}: {fault}") from None


def words(text: str) -> list[str]:
    """The dimensions of a spec, each with what stands in brackets.

    Example::

        >>> words("d0[tp:packed 128, 16] d1")
        ['d0[tp:packed 128, 16]', 'd1']
    """
    return _WORD.findall(text)


def parse_cut(text: str) -> Cut:
    """Read ``axis`` or ``axis:order``; raises ValueError that names the order at fault."""
    axis, _, order = text.strip().partition(":")
    verb, _, rest = order.partition(" ")
    if verb in NUMBERED and (rest or verb != "zigzag"):
        numbers = rest.replace(" ", "").split(",")
        if not all(number.isdecimal() and int(number) > 0 for number in numbers) or (verb == "groups") > (
            len(numbers) == 1
        ):
            raise ValueError(f"order {order!r}; accepted: 'packed' and the sizes, 'groups' and their number")
        return Cut(axis, verb, tuple(map(int, numbers)))
    if order and order not in ORDERS:
        raise ValueError(f"order {order!r}; accepted: {', '.join(ORDERS)}, packed SIZES, groups NUMBER")
    return Cut(axis, order or "contiguous")


def cut(whole: torch.Tensor, spec: ShardSpec, rank: Callable[[str], int], size: Callable[[str], int]) -> torch.Tensor:
    """The part of `whole` that the rank at these coordinates holds.

    Example::

        >>> import torch
        >>> cut(torch.arange(8), ShardSpec.parse("s[cp:zigzag]"), lambda a: 0, lambda a: 2).tolist()
        [0, 1, 6, 7]
    """
    part = whole
    for index, dim in enumerate(spec.dims):
        for item in dim.cuts:
            if item.order != "samples" and size(item.axis) > 1:
                part = _take(part, index, item, rank(item.axis), size(item.axis))
    if spec.flat is not None:
        part = part.reshape(-1)[spec.flat[0] : spec.flat[1]]
    return part


def _take(tensor: torch.Tensor, dim: int, item: Cut, rank: int, count: int) -> torch.Tensor:
    import torch

    if item.order in ("contiguous", "groups"):
        return tensor.chunk(item.parts(count), dim)[item.part(rank, count)]
    pieces = torch.split(tensor, item.pieces(tensor.shape[dim]), dim)
    if item.order == "zigzag":
        chunks = [piece.chunk(2 * count, dim) for piece in pieces]
        return torch.cat([part for chunk in chunks for part in (chunk[rank], chunk[2 * count - 1 - rank])], dim)
    if item.order in ("gated", "packed"):
        return torch.cat([piece.chunk(count, dim)[rank] for piece in pieces], dim)
    raise ValueError(f"a dimension cut over {item.axis} in order {item.order!r} has no fixed place for a rank")


Shape = tuple[int, ...]


class Layout(NamedTuple):
    """Layout of a tensor of one shape: shard text, global shape (None if there is none), its shape, number of elements.

    ``local`` is the shape of the whole local tensor, of which an observation may cover only a flat range.
    """

    shard: str
    whole: Shape | None
    shape: Shape
    numel: int
    spec: ShardSpec
    local: Shape


class Place:
    """Name and layout of an observed tensor.

    `spec` returns the shard spec for a local shape; its text and the global shape are computed once per shape.
    `local_shape` is given where an observation covers only a flat range of the local tensor. `extra` is JSON text that
    every row of the place carries.
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
        """Layout of a tensor of this local shape; computed once per shape."""
        return self.layouts.get(shape) or self._new_layout(shape)

    def _new_layout(self, shape: Shape) -> Layout:
        spec = self._spec(shape).only(lambda axis: self._size(axis) > 1)
        whole = spec.global_shape(self._local_shape or shape, self._size)
        found = Layout(str(spec), whole, tuple(shape), math.prod(shape), spec, self._local_shape or tuple(shape))
        self.layouts[found.shape] = found
        return found
