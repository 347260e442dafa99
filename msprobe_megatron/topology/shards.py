"""Shard specs: which part of the whole tensor a rank holds, as a short text that rows carry.

The text names the dimensions and, in brackets, the axes that cut them, outermost first::

    s[cp:zigzag,tp] b[dp:samples] h        sequence cut over CP in zig-zag, then over TP; batch by data parallel
    d0[tp:gated] d1                        gated fc1: every rank holds [gate part; up part]
    d0[tp] d1; flat 128:256                of the TP shard, elements 128 to 256 in row-major order (optimizer shard)
    d0; partial tp                         the sum over TP is the whole
    ?reason                                cannot be merged, and why

An axis that is not named holds replicas. Pure functions: no Megatron and no communication here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # readers of run directories need specs, not torch
    import torch

ORDERS = ("contiguous", "zigzag", "gated", "samples", "unordered")
_DIM = re.compile(r"([A-Za-z0-9_*]+)(?:\[([^\]]+)\])?$")
_FLAT = re.compile(r"flat (\d+):(\d+)$")


@dataclass(frozen=True)
class Cut:
    """One dimension is cut over one axis."""

    axis: str
    order: str = "contiguous"

    def __str__(self) -> str:
        return self.axis if self.order == "contiguous" else f"{self.axis}:{self.order}"


@dataclass(frozen=True)
class Dim:
    """A dimension: its letter and the axes that cut it."""

    name: str
    cuts: tuple[Cut, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.cuts))}]" if self.cuts else self.name


@dataclass(frozen=True)
class ShardSpec:
    """How the local tensor lies in the whole one.

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
        """Spec of a tensor whose place is not known; the reason is shown to the user."""
        return cls(unknown=reason)

    @classmethod
    def parse(cls, text: str) -> ShardSpec:
        """Read the text form; raises ValueError that quotes the part which is wrong."""
        if text.startswith("?"):
            return cls(unknown=text[1:])
        head, *clauses = [part.strip() for part in text.split(";")]
        spec = cls(dims=tuple(_parse_dim(word) for word in head.split()))
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
        """Axes over which ranks hold different parts."""
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
            cut_by = [size(cut.axis) or 1 for cut in dim.cuts if cut.order != "samples"]
            whole.append(int(extent) * math.prod(cut_by))
        return tuple(whole)


def _parse_dim(word: str) -> Dim:
    match = _DIM.match(word)
    if not match:
        raise ValueError(f"shard spec: cannot read dimension {word!r}; accepted: name or name[axis:order,...]")
    cuts = []
    for item in (match[2] or "").split(","):
        if not item:
            continue
        axis, _, order = item.partition(":")
        if order and order not in ORDERS:
            raise ValueError(f"shard spec: {word!r}: order {order!r}; accepted: {', '.join(ORDERS)}")
        cuts.append(Cut(axis, order or "contiguous"))
    return Dim(match[1], tuple(cuts))


def cut(whole: torch.Tensor, spec: ShardSpec, rank: Callable[[str], int], size: Callable[[str], int]) -> torch.Tensor:
    """The part of `whole` that the rank at these coordinates holds.

    Example::

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

    if item.order == "contiguous":
        return tensor.chunk(count, dim)[rank]
    if item.order == "zigzag":
        pieces = tensor.chunk(2 * count, dim)
        return torch.cat([pieces[rank], pieces[2 * count - 1 - rank]], dim)
    if item.order == "gated":
        return torch.cat([half.chunk(count, dim)[rank] for half in tensor.chunk(2, dim)], dim)
    raise ValueError(f"a dimension cut over {item.axis} in order {item.order!r} has no fixed place for a rank")
