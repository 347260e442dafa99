"""Rows of a live result against the exact ones: the largest error, over what an operator may be off.

An element is measured against itself or its row, whichever is larger. In host memory the compiled kernel does it in one
call; elsewhere torch does, and the figures stay on the device.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import NamedTuple

import torch

from msprobe_megatron.native import library

NAMES = ("elements", "nan_apart", "inf_apart", "over", "ulp", "kappa", "where")
_CODES = {
    torch.float32: library.FLOAT32,
    torch.float64: library.FLOAT64,
    torch.bfloat16: library.BFLOAT16,
    torch.float16: library.FLOAT16,
}
_TINY = 1e-300


class Limits(NamedTuple):
    """What is allowed: units in the last place, multiples of the answer to the nudge, and a part of the element."""

    ulps: float
    working: float
    summed: float


def compare(
    live: torch.Tensor,
    exact: torch.Tensor,
    nudged: torch.Tensor,
    limits: Limits,
    out: torch.Tensor,
    scrambled: torch.Tensor | None = None,
) -> None:
    """Put the figures into the seven places of ``out``; all but ``live`` are of 64 bits and of its shape.

    ``kappa`` is the size of the answer over that of the result, not yet over that of the nudge. With ``scrambled`` an
    element is measured against all rows, and against its row of this.

    Example::

        compare(y, exact, nudged, Limits(1.0, 4.0, 0.0), out)
    """
    kernel, code = library.kernel(), _CODES.get(live.dtype)
    if kernel is not None and code is not None and live.is_cpu and out.is_cpu and out.dtype is torch.float64:
        live, exact, nudged = live.contiguous(), exact.contiguous(), nudged.contiguous()
        other = None if scrambled is None else scrambled.contiguous()
        width = live.shape[-1] if live.dim() else 1
        rows = live.numel() // max(width, 1)
        scale = _scale(live.dtype, *limits)
        kernel.rows(
            live.data_ptr(),
            code,
            exact.data_ptr(),
            nudged.data_ptr(),
            0 if other is None else other.data_ptr(),
            rows,
            width,
            scale.buffer_info()[0],
            out.data_ptr(),
        )
        return
    out.copy_(_with_torch(live, exact, nudged - exact, limits, scrambled))


@lru_cache(maxsize=4096)
def _scale(dtype: torch.dtype, ulps: float, working: float, summed: float) -> array[float]:
    info = torch.finfo(dtype)
    return array("d", [info.eps, info.smallest_normal, info.max, ulps, working, summed])


def _with_torch(
    live: torch.Tensor, exact: torch.Tensor, answer: torch.Tensor, limits: Limits, scrambled: torch.Tensor | None
) -> torch.Tensor:
    info = torch.finfo(live.dtype)
    x, y = live.double(), exact
    # What does not fit the dtype of the live result is Inf in every honest one.
    finite = torch.isfinite(x) & (y.abs() <= info.max)
    nan_apart = (x.isnan() != y.isnan()).sum()
    inf_apart = (torch.isinf(x) & (y.abs() < info.max / 2)).sum()
    error = torch.where(finite, (x - y).abs(), 0.0)
    size = torch.where(y.abs() <= info.max, y.abs(), 0.0)
    keep = size.dim() > 0
    row = size.square().mean(dim=-1, keepdim=True).sqrt() if keep and scrambled is None else size.square().mean().sqrt()
    if scrambled is not None:
        other = torch.nan_to_num(scrambled)
        row = torch.maximum(row, other.square().mean(dim=-1, keepdim=True).sqrt() if keep else other.abs())
    moved = torch.where(torch.isfinite(answer), answer, 0.0)
    response = moved.square().mean(dim=-1, keepdim=True).sqrt() if keep else moved.abs()
    largest = torch.maximum(size, row)
    unit = info.eps * largest + info.smallest_normal * info.eps
    allowed = limits.ulps * unit + limits.working * response + limits.summed * largest + _TINY
    worst = (error / allowed).reshape(-1).max(dim=0)
    kappa = (moved.square().sum() / (size.square().sum() + _TINY)).sqrt()
    return torch.stack(
        [
            torch.full_like(kappa, live.numel()),
            nan_apart.double(),
            inf_apart.double(),
            worst.values,
            (error / unit).max(),
            kappa,
            worst.indices.double(),
        ]
    )
