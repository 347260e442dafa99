"""Rows of a live result against the exact ones: the largest error, over what an operator may be off.

An element is measured against itself or its row, whichever is larger. In host memory the compiled kernel does it in one
call; elsewhere torch does, and the results stay on the device.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import NamedTuple

import torch

from msprobe_megatron.job.measure.native import library

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
    """Write the results into the seven places of ``out``; all but ``live`` are of 64 bits and of its shape.

    ``kappa`` is the size of the answer over that of the result, not yet over that of the nudge. With ``scrambled`` an
    element is measured against all rows, and against its row of this.
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
    x_size, y_size, x_nan, y_nan = x.abs(), y.abs(), x.isnan(), y.isnan()
    # What does not fit the dtype of the live result is Inf in every honest one.
    fits = y_size <= info.max
    infinite = x_size == torch.inf
    finite = fits & (x_size < torch.inf)
    odd = torch.stack((x_nan != y_nan, infinite & (y_size < info.max / 2)))
    nan_apart, inf_apart = odd.view(2, -1).sum(1, dtype=torch.float64).unbind(0)
    error = torch.where(finite, (x - y).abs_(), 0.0)
    size = torch.where(fits, y_size, 0.0)
    squares = size.square()
    keep = size.dim() > 0
    row = squares.mean(dim=-1, keepdim=True).sqrt_() if keep and scrambled is None else squares.mean().sqrt_()
    if scrambled is not None:
        other = torch.nan_to_num(scrambled)
        row = torch.maximum(row, other.square().mean(dim=-1, keepdim=True).sqrt() if keep else other.abs())
    moved = torch.where(answer.abs() < torch.inf, answer, 0.0)
    moved_squares = moved.square()
    response = moved_squares.mean(dim=-1, keepdim=True).sqrt_() if keep else moved.abs()
    largest = torch.maximum(size, row)
    unit = info.eps * largest + info.smallest_normal * info.eps
    allowed = limits.ulps * unit + limits.working * response + limits.summed * largest + _TINY
    worst = (error / allowed).reshape(-1).max(dim=0)
    kappa = (moved_squares.sum() / (squares.sum() + _TINY)).sqrt()
    return torch.stack(
        [
            torch.full_like(kappa, live.numel()),
            nan_apart,
            inf_apart,
            worst.values,
            (error / unit).max(),
            kappa,
            worst.indices.double(),
        ]
    )
