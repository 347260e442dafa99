"""Two results of one operator, compared element by element in one pass: what the perturb probe judges by.

Every element counts, whatever the size of the tensor; NaN and Inf are told apart and never hide the rest. In host
memory the compiled kernel reads both tensors once; elsewhere torch does, a bounded piece at a time, and the figures
stay on the device.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from msprobe_megatron.measure.flatten import is_dense
from msprobe_megatron.native import library

NAMES = (
    *("elements", "nan_live", "nan_apart", "inf_live", "inf_apart", "different", "max_abs", "where"),
    *("diff_squares", "live_squares", "max_ulp", "ratio", "flipped"),
)
COUNT = len(NAMES)
_PIECE = 1 << 22
_CODES = {
    torch.float32: library.FLOAT32,
    torch.float64: library.FLOAT64,
    torch.bfloat16: library.BFLOAT16,
    torch.float16: library.FLOAT16,
}


@cache
def digits(dtype: torch.dtype) -> tuple[int, int]:
    """Bits of the fraction of a floating type, and the exponent of its smallest normal number.

    Example::

        >>> digits(torch.bfloat16)
        (7, -126)
    """
    info = torch.finfo(dtype)
    return round(-math.log2(info.eps)), round(math.log2(info.smallest_normal))


def compare(live: torch.Tensor, other: torch.Tensor, out: torch.Tensor, floor: float = 0.0) -> None:
    """Put the figures of a pair of one dtype and shape into the first ``COUNT`` places of ``out``.

    ``max_ulp`` is in units of the last place of the larger of two elements, ``ratio`` the largest quotient of their
    magnitudes where those below ``floor`` count as ``floor`` (1.0 if ``floor`` is 0).

    Example::

        out = torch.empty(COUNT, dtype=torch.float64)
        compare(torch.ones(3), torch.tensor([1.0, 1.0, 2.0]), out)
        out[NAMES.index("different")]        # 1.0
    """
    live, other = live.detach(), other.detach()
    kernel = library.kernel()
    code = _CODES.get(live.dtype)
    if kernel is not None and code is not None and live.is_cpu and out.is_cpu and out.dtype is torch.float64:
        same_layout = live.stride() == other.stride() and is_dense(live)
        a, b = (live, other) if same_layout else (live.contiguous(), other.contiguous())
        bits, least = digits(live.dtype)
        kernel.pair(a.data_ptr(), b.data_ptr(), a.numel(), code, bits, least, floor, out.data_ptr())
        return
    _with_torch(live.reshape(-1), other.reshape(-1), out, floor)


def _with_torch(live: torch.Tensor, other: torch.Tensor, out: torch.Tensor, floor: float) -> None:
    total = torch.zeros(COUNT, dtype=out.dtype, device=live.device)
    total[7], total[11] = -1.0, 1.0
    for start in range(0, live.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        part = _piece(live[piece], other[piece], out.dtype, floor)
        worse = part[10] > total[10]
        where = torch.where(worse, part[7] + start, total[7])
        most = torch.maximum(total, part)
        total = total + part
        total[[6, 10, 11, 12]] = most[[6, 10, 11, 12]]
        total[7] = where
    out[:COUNT].copy_(total)


def _piece(live: torch.Tensor, other: torch.Tensor, wide: torch.dtype, floor: float) -> torch.Tensor:
    bits, least = digits(live.dtype)
    x, y = live.to(wide), other.to(wide)
    x_nan, y_nan, x_inf, y_inf = x.isnan(), y.isnan(), x.isinf(), y.isinf()
    neither = ~(x_nan | y_nan)
    finite = neither & ~(x_inf | y_inf)
    x0, y0 = torch.where(finite, x, 0.0), torch.where(finite, y, 0.0)
    apart = (x0 - y0).abs()
    size = torch.maximum(x0.abs(), y0.abs())
    # frexp gives a fraction from 0.5 to 1, hence one less than the exponent of the first digit.
    exponent = torch.frexp(size).exponent.sub(1).clamp(min=least) - bits
    ulps = torch.where(apart > 0, torch.ldexp(apart, -exponent), 0.0)
    most, where = ulps.max(dim=0)
    ratio, flipped = torch.ones_like(most), torch.zeros_like(most)
    if floor > 0:
        quotient = x0.abs().clamp(min=floor) / y0.abs().clamp(min=floor)
        ratio = torch.maximum(quotient.max(), 1 / quotient.min())
        flipped = ((x0 * y0).min() < -floor * floor).to(wide)
    return torch.stack(
        [
            torch.full_like(most, live.numel()),
            x_nan.sum().to(wide),
            (x_nan != y_nan).sum().to(wide),
            x_inf.sum().to(wide),
            (neither & (x_inf | y_inf) & (x != y)).sum().to(wide),
            (apart > 0).sum().to(wide),
            apart.max(),
            where.to(wide),
            (apart * apart).sum(),
            (x0 * x0).sum(),
            most,
            ratio,
            flipped,
        ]
    )
