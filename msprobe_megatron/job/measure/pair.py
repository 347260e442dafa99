"""Two results of one operator, compared element by element in one pass: what the perturb probe judges by.

Every element counts, whatever the size of the tensor; NaN and Inf are counted separately and hide nothing. In host
memory the compiled kernel reads both tensors once; elsewhere torch does, a bounded piece at a time, and the figures
stay on the device. Where the two have another layout or dtype it is the pieces that are copied, never a whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch

from msprobe_megatron.job.measure.flatten import is_dense
from msprobe_megatron.job.measure.native import library

NAMES = (
    *("elements", "nan_live", "nan_apart", "inf_live", "inf_apart", "different", "max_abs", "where"),
    *("diff_squares", "live_squares", "max_ulp", "ratio", "flipped"),
)
COUNT = len(NAMES)
_WHERE, _ULP, _RATIO = NAMES.index("where"), NAMES.index("max_ulp"), NAMES.index("ratio")
# As slices: a list of places is a table that the host would have to copy to the device, and wait for it.
_LARGEST = tuple(
    slice(NAMES.index(first), NAMES.index(last) + 1) for first, last in (("max_abs", "max_abs"), ("max_ulp", "flipped"))
)
_PIECE = 1 << 20
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
    """Put the figures of a pair of one shape into the first ``COUNT`` places of ``out``.

    ``max_ulp`` is in units of the last place of the larger of two elements, in the dtype of ``other``; ``ratio`` the
    largest quotient of their magnitudes where those below ``floor`` count as ``floor`` (1.0 if ``floor`` is 0).

    Example::

        >>> out = torch.empty(COUNT, dtype=torch.float64)
        >>> compare(torch.ones(3), torch.tensor([1.0, 1.0, 2.0]), out)
        >>> out[NAMES.index("different")]
        tensor(1., dtype=torch.float64)
    """
    live, other = live.detach(), other.detach()
    kernel = library.kernel()
    here = live.is_cpu and other.is_cpu and out.is_cpu
    if not here or other.dtype not in _CODES or out.dtype is not torch.float64:
        kernel = None
    if kernel is not None and live.dtype is other.dtype and live.stride() == other.stride() and is_dense(live):
        _with_kernel(kernel, live, other, out, floor)
        return
    total: torch.Tensor | None = None
    start = 0
    for x, y in pieces(live, other):
        if kernel is not None:
            part = torch.empty(COUNT, dtype=out.dtype, device=live.device)
            _with_kernel(kernel, x.to(y.dtype), y, part, floor)
        else:
            part = _piece(x.to(y.dtype), y, out.dtype, floor)
        total = part if total is None else _together(total, part, start)
        start += x.numel()
    if total is None:
        total = torch.zeros(COUNT, dtype=out.dtype, device=live.device)
        total[_WHERE], total[_RATIO] = -1.0, 1.0
    out[:COUNT].copy_(total)


def pieces(live: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors of one shape as flat pieces of a bounded size that lie at the same place, in the order of
    elements.
    """
    if live.numel() <= _PIECE:
        if live.numel():
            # What is expanded in all of its dimensions is a view still when it is flat.
            yield live.reshape(-1).contiguous(), other.reshape(-1).contiguous()
    elif live.is_contiguous() and other.is_contiguous():
        yield from zip(torch.split(live.view(-1), _PIECE), torch.split(other.view(-1), _PIECE), strict=True)
    else:
        dim = next(d for d in range(live.dim()) if live.size(d) > 1)
        rows = max(1, _PIECE * live.size(dim) // live.numel())
        for x, y in zip(torch.split(live, rows, dim), torch.split(other, rows, dim), strict=True):
            yield from pieces(x, y)


def _with_kernel(
    kernel: library.Kernel, live: torch.Tensor, other: torch.Tensor, out: torch.Tensor, floor: float
) -> None:
    bits, least = digits(other.dtype)
    code = _CODES[other.dtype]
    kernel.pair(live.data_ptr(), other.data_ptr(), live.numel(), code, bits, least, floor, out.data_ptr())


def _together(total: torch.Tensor, part: torch.Tensor, start: int) -> torch.Tensor:
    """Figures of a tensor so far, and of the piece that begins at element ``start``."""
    worse = part[_ULP] > total[_ULP]
    where = torch.where(worse, part[_WHERE] + start, total[_WHERE])
    most = torch.maximum(total, part)
    total = total + part
    for some in _LARGEST:
        total[some] = most[some]
    total[_WHERE] = where
    return total


def _exponents(size: torch.Tensor) -> torch.Tensor:
    """Exponents of the first digits of finite numbers from 0 up, by their bits: torch_npu has no frexp.

    Below the smallest normal number they are one less than its exponent.

    Example::

        >>> _exponents(torch.tensor([1.0, 6.0, 0.25]))
        tensor([ 0,  2, -2], dtype=torch.int32)
    """
    words, fraction, bias = (torch.int64, 52, 1023) if size.dtype is torch.float64 else (torch.int32, 23, 127)
    return (size.view(words) >> fraction) - bias


def _piece(live: torch.Tensor, other: torch.Tensor, wide: torch.dtype, floor: float) -> torch.Tensor:
    # Both tensors as one, and masks as one: each operation is a launch on a device.
    bits, least = digits(live.dtype)
    both = torch.stack((live.to(wide), other.to(wide)))
    sizes, nan = both.abs(), both.isnan()
    finite = (sizes < torch.inf).all(0)
    numbers = torch.where(finite, both, 0.0)
    apart = (numbers[0] - numbers[1]).abs()
    exponent = _exponents(numbers.abs().amax(0)).clamp_(min=least)
    differs = apart > 0
    ulps = torch.where(differs, torch.ldexp(apart, bits - exponent), 0.0)
    most, where = ulps.max(dim=0)
    masks = (nan[0], nan[0] != nan[1], sizes[0] == torch.inf, (both[0] != both[1]) > (finite | nan.any(0)), differs)
    x_nan, nan_apart, x_inf, inf_apart, different = torch.stack(masks).sum(1, dtype=wide).unbind(0)
    squares = torch.stack((apart, numbers[0])).square_().sum(1).unbind(0)
    ratio, flipped = torch.ones_like(most), torch.zeros_like(most)
    if floor > 0:
        quotient = numbers[0].abs().clamp(min=floor) / numbers[1].abs().clamp(min=floor)
        ratio = torch.maximum(quotient.max(), 1 / quotient.min())
        flipped = ((numbers[0] * numbers[1]).min() < -floor * floor).to(wide)
    return torch.stack(
        [
            torch.full_like(most, live.numel()),
            x_nan,
            nan_apart,
            x_inf,
            inf_apart,
            different,
            apart.max(),
            torch.where(most > 0, where, -1).to(wide),
            *squares,
            most,
            ratio,
            flipped,
        ]
    )
