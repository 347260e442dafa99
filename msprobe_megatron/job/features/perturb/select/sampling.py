"""A few rows of a call, computed alone: the arguments cut to these rows, and their position in the result.

Rows of an elementwise operator, of a softmax or a norm off its dimension, of a matrix product (and columns of its
second factor) each depend on their own part of the inputs only. First and last row are always chosen, the others evenly
spread. A call whose rows are not independent is taken whole if it is small, and skipped if not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from msprobe_megatron.job.features.perturb.judge.tolerance import short_name
from msprobe_megatron.job.measure.tables import on_device

MOST_ELEMENTS = 1 << 14
_WHOLE_ELEMENTS = 1 << 18
_COLUMNS = 64
Cut = Callable[[torch.Tensor], torch.Tensor]


class Sample(NamedTuple):
    """Arguments of the smaller call, how to cut the live result alike, and how many terms an element adds up."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cut: Cut
    terms: int
    batches: bool = False
    """Only batches of matrices were cut, so gradients of all factors can be computed."""


@lru_cache(maxsize=1024)
def spread(size: int, count: int, device: torch.device) -> torch.Tensor:
    """``count`` numbers below ``size``, the first and the last among them.

    Example::

        >>> spread(100, 4, torch.device("cpu"))
        tensor([ 0, 33, 66, 99])
    """
    count = min(size, count)
    numbers = [round(i * (size - 1) / max(count - 1, 1)) for i in range(count)]
    return on_device(torch.tensor(numbers, dtype=torch.int64), device)


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
    """The rows of a call to compute again; None if rows cannot be separated. ``rows`` 0 takes everything.

    ``backward`` cuts matrix products along batches only: a gradient needs all of the other factor.
    """
    terms = terms_of(kind, args, result, api)
    if rows == 0 or result.dim() == 0:
        return _whole(args, kwargs, terms, limited=rows != 0)
    if kind == "gemm":
        found = _sample_gemm(short_name(api), args, kwargs, result, rows, terms, backward)
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
            except _CannotCut:
                pass
    return _whole(args, kwargs, terms, limited=True)


class _CannotCut(Exception):
    """An argument has a shape that does not fit the rows of the result."""


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _whole(args: tuple[Any, ...], kwargs: dict[str, Any], terms: int, *, limited: bool) -> Sample | None:
    size = sum(t.numel() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
    return None if limited and size > _WHOLE_ELEMENTS else Sample(args, kwargs, _same, terms)


def terms_of(kind: str, args: tuple[Any, ...], result: torch.Tensor, api: str = "") -> int:
    """How many numbers are added up for an element of the result; a convolution is recognized by ``api``.

    Example::

        >>> terms_of("gemm", (torch.ones(2, 8), torch.ones(8, 3)), torch.ones(2, 3))
        8
    """
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    if not tensors or kind == "elementwise":
        return 1
    if kind == "gemm":
        if "conv" in api and len(tensors) > 1 and tensors[1].dim() > 2 and tensors[1].numel():
            return tensors[1].numel() // tensors[1].shape["transpose" in api]
        # The factor before the last tensor: `x @ w`, `addmm(b, x, w)`, and the weight (outputs, inputs) of `linear`.
        factor = tensors[-2] if len(tensors) > 1 else tensors[0]
        return factor.shape[-1] if factor.dim() else 1
    return max(1, max(t.numel() for t in tensors) // max(result.numel(), 1)) if kind == "reduction" else _last(tensors)


def _last(tensors: list[torch.Tensor]) -> int:
    return max((t.shape[-1] for t in tensors if t.dim()), default=1)


def _free_dims(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> list[int]:
    """Dimensions of the result along which its parts are independent."""
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
            raise _CannotCut
        return x.index_select(own, index)

    return cut


def _each(args: tuple[Any, ...], kwargs: dict[str, Any], cut: Cut) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def apply(value: Any) -> Any:
        if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
            raise _CannotCut
        return cut(value) if isinstance(value, torch.Tensor) else value

    return tuple(map(apply, args)), {key: apply(value) for key, value in kwargs.items()}


class _Factors(NamedTuple):
    """The two factors of a matrix product among the arguments of a call."""

    at: int
    """Index of the left one; arguments before it are added to the product."""
    left: torch.Tensor
    right: torch.Tensor
    right_is_transposed: bool

    @property
    def batched(self) -> bool:
        """Whether the right factor has batches of its own."""
        return self.right.dim() > 2


_GEMMS = {"matmul": 0, "mm": 0, "bmm": 0, "linear": 0, "rmatmul": 0, "addmm": 1, "baddbmm": 1}
"""By name: index of the left factor."""


def _factors(name: str, args: tuple[Any, ...], result: torch.Tensor) -> _Factors | None:
    """The factors of a product whose rows are independent; None for other calls."""
    at = _GEMMS.get(name)
    if at is None or len(args) < at + 2:
        return None
    left, right = args[at], args[at + 1]
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return None
    if min(left.dim(), right.dim(), result.dim()) < 2 or result.dim() != max(left.dim(), right.dim()):
        return None
    found = _Factors(at, left, right, name == "linear")
    return None if found.batched and left.shape[:-2] != right.shape[:-2] else found


def _choose_rows(result: torch.Tensor, rows: int, backward: bool) -> dict[int, torch.Tensor]:
    """By dimension of the result (batches, rows of the left factor, columns of the right): the chosen indices."""
    top = result.dim()
    leading = range(top - 2 if backward else top - 1)
    widest = max(leading, key=result.size)
    few = max(1, min(4, MOST_ELEMENTS // (rows * _COLUMNS)))
    chosen = {}
    for dim in leading:
        count = 2 if backward else rows if dim == widest else few
        if result.size(dim) > count:
            chosen[dim] = spread(result.size(dim), max(count, 2), result.device)
    if result.size(-1) > _COLUMNS and not backward:
        chosen[top - 1] = spread(result.size(-1), _COLUMNS, result.device)
    return chosen


def _sample_gemm(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: torch.Tensor,
    rows: int,
    terms: int,
    backward: bool,
) -> Sample | None:
    """Rows of the first factor, columns of the second, and a few batches where both have them."""
    factors = _factors(name, args, result)
    if factors is None or (backward and not factors.batched) or math.prod(result.shape) == 0:
        return None
    top, chosen = result.dim(), _choose_rows(result, rows, backward)
    left, right = factors.left, factors.right
    for dim, index in chosen.items():
        if dim == top - 1:
            right = right.index_select(0 if factors.right_is_transposed else right.dim() - 1, index)
            continue
        left = left.index_select(dim, index)
        if factors.batched and dim < top - 2:
            right = right.index_select(dim, index)

    def cut(x: torch.Tensor) -> torch.Tensor:
        for dim, index in chosen.items():
            own = x.dim() - (top - dim)
            if own >= 0 and x.size(own) > 1:
                x = x.index_select(own, index)
        return x

    def cut_tensor(value: Any) -> Any:
        return cut(value) if isinstance(value, torch.Tensor) else value

    before, after = map(cut_tensor, args[: factors.at]), map(cut_tensor, args[factors.at + 2 :])
    others = {key: cut_tensor(value) for key, value in kwargs.items()}
    return Sample((*before, left, right, *after), others, cut, terms, batches=factors.batched and backward)
