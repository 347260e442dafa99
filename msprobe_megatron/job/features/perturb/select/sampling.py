"""Rows of a call that can be computed alone: the arguments cut to a few of them, and where they stand in the result.

Rows of an elementwise operator, of a softmax or a norm off its dimension, of a product of matrices (and columns of the
second one): each depends on its own part of the inputs only. First and last are always among them, the others evenly
spread. A call whose rows are not known is taken whole if it is small, and left alone if not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from msprobe_megatron.probes.perturb.classes import short_name

MOST_ELEMENTS = 1 << 14
_WHOLE_ELEMENTS = 1 << 18
_COLUMNS = 64
Cut = Callable[[torch.Tensor], torch.Tensor]


class Sample(NamedTuple):
    """Arguments of the smaller call, the same part of the live result, the number of terms that were added up."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cut: Cut
    terms: int
    batches: bool = False
    """Whether only batches of matrices were cut, so that gradients of all factors can be computed."""


@lru_cache(maxsize=1024)
def spread(size: int, count: int, device: torch.device) -> torch.Tensor:
    """``count`` numbers below ``size``, the first and the last among them.

    Example::

        >>> spread(100, 4, torch.device("cpu"))
        tensor([ 0, 33, 66, 99])
    """
    count = min(size, count)
    numbers = [round(i * (size - 1) / max(count - 1, 1)) for i in range(count)]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def sample(
    api: str,
    kind: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: torch.Tensor,
    rows: int,
    *,
    backward: bool = False,
) -> Sample | None:
    """The rows of a call to compute again; None where there is no way. ``rows`` 0 takes everything.

    ``backward`` cuts products of matrices along batches only: a gradient needs the whole of the other factor.

    Example::

        part = sample("torch.softmax", "softmax", (x, -1), {}, y, rows=16)
        exact = torch.softmax(part.args[0].double(), -1)      # to be compared with part.cut(y)
    """
    terms = terms_of(kind, args, result, api)
    if rows == 0 or result.dim() == 0:
        return _whole(args, kwargs, terms, limited=rows != 0)
    if kind == "gemm":
        found = _gemm(short_name(api), args, kwargs, result, rows, terms, backward)
        return found or _whole(args, kwargs, terms, limited=True)
    free = _free_dims(kind, args, kwargs, result)
    if free:
        dim = max(free, key=result.size)
        row = result.numel() // max(result.size(dim), 1)
        count = max(2, min(MOST_ELEMENTS // max(row, 1), rows if row > 1 else MOST_ELEMENTS))
        if count >= result.size(dim):
            return Sample(args, kwargs, _same, terms)
        cut = _cutter(tuple(result.shape), dim, spread(result.size(dim), count, result.device))
        if cut is not None:
            try:
                return Sample(*_each(args, kwargs, cut), cut, terms)
            except _Misfit:
                pass
    return _whole(args, kwargs, terms, limited=True)


class _Misfit(Exception):
    pass


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _whole(args: tuple[Any, ...], kwargs: dict[str, Any], terms: int, *, limited: bool) -> Sample | None:
    size = sum(t.numel() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
    return None if limited and size > _WHOLE_ELEMENTS else Sample(args, kwargs, _same, terms)


def terms_of(kind: str, args: tuple[Any, ...], result: torch.Tensor, api: str = "") -> int:
    """How many numbers an element of the result is made from; for a convolution ``api`` must be told.

    Example::

        terms_of("gemm", (torch.ones(2, 8), torch.ones(8, 3)), torch.ones(2, 3))      # 8
    """
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    if not tensors or kind == "elementwise":
        return 1
    if kind == "gemm":
        if "conv" in api and len(tensors) > 1 and tensors[1].dim() > 2 and tensors[1].numel():  # noqa: PLR2004
            return tensors[1].numel() // tensors[1].shape["transpose" in api]
        # The factor before the last tensor: `x @ w`, `addmm(b, x, w)`, and the weight (outputs, inputs) of `linear`.
        factor = tensors[-2] if len(tensors) > 1 else tensors[0]
        return factor.shape[-1] if factor.dim() else 1
    return max(1, max(t.numel() for t in tensors) // max(result.numel(), 1)) if kind == "reduction" else _last(tensors)


def _last(tensors: list[torch.Tensor]) -> int:
    return max((t.shape[-1] for t in tensors if t.dim()), default=1)


def _free_dims(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> list[int]:
    """Dimensions of the result along which its parts do not depend on one another."""
    dims = list(range(result.dim()))
    if kind == "elementwise":
        return dims
    first = args[0] if args else kwargs.get("input")
    if not isinstance(first, torch.Tensor) or first.shape != result.shape:
        return []
    if kind == "softmax":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return [d for d in dims if d != dim % result.dim()] if type(dim) is int else dims[:-1]
    if kind == "norm":
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else None)
        return dims[: -len(shape)] if isinstance(shape, list | tuple | torch.Size) and shape else dims[:-1]
    return []


def _cutter(shape: tuple[int, ...], dim: int, index: torch.Tensor) -> Cut:
    size, from_right = shape[dim], len(shape) - dim

    def cut(x: torch.Tensor) -> torch.Tensor:
        own = x.dim() - from_right
        if own < 0 or x.size(own) == 1:
            return x
        if x.size(own) != size or x.dim() > len(shape):
            raise _Misfit
        return x.index_select(own, index)

    return cut


def _each(args: tuple[Any, ...], kwargs: dict[str, Any], cut: Cut) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def apply(value: Any) -> Any:
        if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
            raise _Misfit
        return cut(value) if isinstance(value, torch.Tensor) else value

    return tuple(map(apply, args)), {key: apply(value) for key, value in kwargs.items()}


def _gemm(  # noqa: PLR0911, PLR0912 (one test after another: is this a product whose rows are known)
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: torch.Tensor,
    rows: int,
    terms: int,
    backward: bool,
) -> Sample | None:
    """Rows of the first factor, columns of the second, and where both have batches a few of these."""
    added = {"addmm": 1, "baddbmm": 1}.get(name, 0)
    if len(args) < added + 2 or name not in ("matmul", "mm", "bmm", "linear", "addmm", "baddbmm", "rmatmul"):
        return None
    left, right = args[added], args[added + 1]
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return None
    if min(left.dim(), right.dim()) < 2 or result.dim() < 2 or result.dim() != max(left.dim(), right.dim()):
        return None
    device, top = result.device, result.dim()
    batched = right.dim() > 2
    if batched and left.shape[:-2] != right.shape[:-2]:
        return None
    # Dimensions of the result: batches, then rows of the left, then columns of the right.
    picks: dict[int, torch.Tensor] = {}
    if backward and not batched:
        return None
    leading = list(range(top - 2 if backward else top - 1))
    wide = max(leading, key=result.size)
    for dim in leading:
        count = rows if dim == wide else max(1, min(4, MOST_ELEMENTS // (rows * _COLUMNS)))
        if backward:
            count = 2
        if result.size(dim) > count:
            picks[dim] = spread(result.size(dim), max(count, 2), device)
    if result.size(-1) > _COLUMNS and not backward:
        picks[top - 1] = spread(result.size(-1), _COLUMNS, device)
    rows_of_right = name == "linear"
    for dim, index in picks.items():
        if dim < top - 1:
            left = left.index_select(dim, index)
            if batched and dim < top - 2:
                right = right.index_select(dim, index)
        else:
            right = right.index_select(0 if rows_of_right else right.dim() - 1, index)

    def cut(x: torch.Tensor) -> torch.Tensor:
        for dim, index in picks.items():
            own = x.dim() - (top - dim)
            if own >= 0 and x.size(own) > 1:
                x = x.index_select(own, index)
        return x

    before = tuple(cut(value) if isinstance(value, torch.Tensor) else value for value in args[:added])
    after = tuple(cut(value) if isinstance(value, torch.Tensor) else value for value in args[added + 2 :])
    others = {key: cut(value) if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}
    if math.prod(result.shape) == 0:
        return None
    return Sample((*before, left, right, *after), others, cut, terms, batches=batched and backward)
