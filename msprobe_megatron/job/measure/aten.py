"""Statistics by six operations of torch per tensor, seven in host memory: for a device without a kernel, and for a CPU
without a compiler.

Nothing is read back and nothing branches on data. Each element is classed (NaN, infinite, zero, other), the classes are
looked up in a table, and what must not count is replaced, so that three reductions over the rows of one scratch matrix
give everything. On a device the results stay as they come, in the first ten float32 of the slot's row; `finish` turns
them into statistics on the host, in the writer thread.

Accuracy on a device: float32 throughout, by torch's own reductions. ``sumsq`` overflows where an element is larger than
1.8e19, which the writer records as null, and elements smaller than 1e-22 add nothing to it. Counts and extremes are
exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

PIECE = 1 << 21
"""Elements in work at once on a device: 76 MB of scratch memory."""
HOST_PIECE = 1 << 16
"""The same on a CPU, in float64: what stays in a cache."""
PARTS = 10
"""Results of a piece: NaN, +Inf, -Inf, zeros, sum, sum of squares; then two minima and two maxima, of which the first
and the last are those of the finite elements."""

_NEGATIVE_INF, _NEGATIVE, _ZERO, _POSITIVE, _POSITIVE_INF, _NAN = range(6)
# Those that `torch.bucketize` does not take.
_CONVERTED = {
    getattr(torch, name): into
    for name, into in (("uint16", torch.int32), ("uint32", torch.int64), ("uint64", torch.float64))
    if hasattr(torch, name)
}


@lru_cache(maxsize=256)
def _boundaries(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What `torch.bucketize` sorts elements by; integers have no first and no last two classes."""
    if not dtype.is_floating_point:
        return _constant([-1, 0], dtype, device) if dtype.is_signed else _constant([0], dtype, device)
    info = torch.finfo(dtype)
    # Some devices take smaller numbers for zero, and a boundary that is zero would hide the zeros.
    least = info.smallest_normal if device.type == "npu" else info.smallest_normal * info.eps
    return _constant([-np.inf, -least, 0.0, info.max, np.inf], dtype, device)


@lru_cache(maxsize=256)
def _classes(dtype: torch.dtype, work: torch.dtype, device: torch.device) -> torch.Tensor:
    """A column a class: finite, NaN, +Inf, -Inf, zero. For 8-bit floats a column a byte, with its value first."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        bits = torch.arange(256, dtype=torch.uint8, device="cpu")
        numbers = bits.view(dtype).to(torch.float32).numpy()
        masks = [np.isfinite(numbers), np.isnan(numbers), numbers == np.inf, numbers == -np.inf, numbers == 0]
        rows = [mask.astype(np.float64).tolist() for mask in masks]
        values = [np.where(masks[0], numbers, 0.0).tolist()]
    else:
        classes: tuple[int, ...] = (_NEGATIVE_INF, _NEGATIVE, _ZERO, _POSITIVE, _POSITIVE_INF, _NAN)
        if not dtype.is_floating_point:
            classes = (_NEGATIVE, _ZERO, _POSITIVE) if dtype.is_signed else (_ZERO, _POSITIVE)
        wanted = ({_NEGATIVE, _ZERO, _POSITIVE}, {_NAN}, {_POSITIVE_INF}, {_NEGATIVE_INF}, {_ZERO})
        rows, values = [[float(kind in some) for kind in classes] for some in wanted], []
    with torch.inference_mode(False), torch.no_grad():
        table = torch.tensor([*values, *rows], dtype=torch.float64, device="cpu").to(work)
        # The row of the finite ones is read as bools, by the first byte of each number.
        table[-5].view(torch.uint8).copy_(_first_bytes(rows[0], work))
    return _moved(table, device)


def _first_bytes(flags: list[float], work: torch.dtype) -> torch.Tensor:
    found = torch.zeros((len(flags), work.itemsize), dtype=torch.uint8, device="cpu")
    found[:, 0] = torch.tensor(flags, device="cpu")
    return found.view(-1)


@lru_cache(maxsize=64)
def _fills(work: torch.dtype, device: torch.device) -> torch.Tensor:
    return _constant([[0.0], [0.0], [np.inf], [-np.inf]], work, device)


# What was copied to a device stays: not every allocator keeps memory that a copy is still to read.
_sources: list[torch.Tensor] = []


def _constant(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _moved(torch.tensor(values, dtype=torch.float64, device="cpu").to(dtype), device)


def _moved(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Once a dtype and device, so not in the steps that are measured; pinned, so that not even that waits."""
    with torch.inference_mode(False), torch.no_grad():
        if device.type == "cpu":
            return host
        try:
            _sources.append(host.pin_memory())
        except RuntimeError:  # torch_npu in a thread of the autograd engine: this copy waits
            return host.to(device)
        return _sources[-1].to(device, non_blocking=True)


def reduce(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write the partial results of ``x``, real and not empty, into the `PARTS` places of ``out``, in its precision."""
    work, device = out.dtype, x.device
    if x.dtype is torch.bool:
        x = x.view(torch.uint8)
    elif x.dtype in _CONVERTED:
        x = x.to(_CONVERTED[x.dtype])
    if x.dtype is torch.float64 and work is torch.float32:
        x = x.to(work)
    table = _classes(x.dtype, work, device)
    rows, value = len(table), x
    scratch = torch.empty((rows + 4, x.numel()), dtype=work, device=device)
    if rows == 6:
        value = scratch[0].view(x.shape)
        where = x.view(torch.uint8).to(torch.int32, memory_format=torch.contiguous_format)
    else:
        if not x.is_contiguous():
            _expect_copies()
        where = torch.bucketize(x, _boundaries(x.dtype, device), out_int32=True)
    torch.index_select(table, 1, where.view(-1), out=scratch[:rows])
    finite = scratch[rows - 5].view(torch.bool)[:: work.itemsize].view(x.shape)
    cleaned = scratch[rows:]  # twice with zeros in place of what is not finite, then with Inf, then with -Inf
    torch.where(finite, value, _fills(work, device).view(4, *[1] * x.dim()), out=cleaned.view(4, *x.shape))
    cleaned[1].mul_(cleaned[0])
    torch.sum(scratch[rows - 4 : rows + 2], 1, out=out[:6])
    if work is torch.float64:
        # In host memory not aminmax, which wakes a thread for each row, however short: on a loaded host that took 20 ms
        # and more.
        torch.amin(cleaned[2:], 1, out=out[6:8])
        torch.amax(cleaned[2:], 1, out=out[8:])
    else:
        torch.aminmax(cleaned[2:], dim=1, out=(out[6:8], out[8:]))


@lru_cache(maxsize=1)
def _expect_copies() -> None:
    """Let torch say now, unheard, what it says once a process: that it copies a tensor with gaps to sort it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        some = torch.zeros((2, 2), dtype=torch.float32, device="cpu")
        torch.bucketize(some.t(), some[0])


def pieces(x: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Views that together hold each element of ``x`` once, of at most ``limit`` elements each."""
    if x.numel() <= limit:
        yield x
    elif x.is_contiguous():
        yield from torch.split(x.view(-1), limit)
    else:
        # Cutting the widest dimension always ends: a piece of one element is below any limit.
        dim = max(range(x.dim()), key=x.size)
        half = x.size(dim) // 2
        yield from pieces(x.narrow(dim, 0, half), limit)
        yield from pieces(x.narrow(dim, half, x.size(dim) - half), limit)


def measure_on_host(x: torch.Tensor, times: int, floats: torch.Tensor, counts: torch.Tensor) -> None:
    """Write the statistics of a CPU tensor, real and not empty, each element standing for ``times``."""
    parts: list[torch.Tensor] = []
    for piece in pieces(x, HOST_PIECE):
        parts.append(torch.empty(PARTS, dtype=torch.float64, device="cpu"))
        reduce(piece, parts[-1])
    found = np.stack([part.numpy() for part in parts])
    sums = found[:, :6].sum(0) * times
    low, high = float(found[:, 6].min()), float(found[:, 9].max())
    with torch.no_grad():
        floats.copy_(torch.tensor([low, high, sums[4], sums[5], max(high, -low)], dtype=torch.float64, device="cpu"))
        counts.copy_(torch.from_numpy(sums[:4].astype(np.int64)))


def measure_into_row(x: torch.Tensor, times: int, row: torch.Tensor, *, wide: bool) -> None:
    """Write the statistics of a device tensor, real and not empty, into a row that is blank; `finish` completes it."""
    if x.numel() <= PIECE and times == 1:
        reduce(x, row[: PARTS // 2].view(torch.float32))
        return
    parts = list(pieces(x, PIECE))
    found = torch.empty((len(parts), PARTS), dtype=torch.float32, device=x.device)
    for piece, part in zip(parts, found.unbind(0), strict=True):
        reduce(piece, part)
    dtype = torch.float64 if wide else torch.float32
    floats, counts = row.view(dtype)[:5], row[5:9] if wide else row[3:7]
    floats[0].copy_(found[:, 6].amin())
    floats[1].copy_(found[:, 9].amax())
    torch.sum(found[:, 4:6], 0, dtype=dtype, out=floats[2:4])
    torch.maximum(floats[1], -floats[0], out=floats[4])
    # In integers, because float32 counts to 2**24.
    torch.sum(found[:, :4], 0, dtype=torch.int64, out=counts)
    if times != 1:
        floats[2:4].mul_(times)
        counts.mul_(times)


def finish(words: npt.NDArray[np.int64], *, wide: bool) -> None:
    """Turn the partial results that `measure_into_row` left in rows into statistics, in place; leaves other rows."""
    first = 5 if wide else 3
    parts = np.ascontiguousarray(words[:, : PARTS // 2]).view(np.float32)
    # No count of zeros yet, though the row is not blank: that is NaN in its first float.
    mine = np.flatnonzero((words[:, first + 3] == -1) & ~np.isnan(parts[:, 1]))
    if not len(mine):
        return
    found = parts[mine].astype(np.float64)
    low, high = found[:, 6], found[:, 9]
    floats = np.stack((low, high, found[:, 4], found[:, 5], np.maximum(high, -low)), 1)
    if wide:
        words[mine, :5] = floats.view(np.int64)
    else:
        narrow = np.full((len(mine), 6), np.nan, np.float32)
        narrow[:, :5] = floats
        words[mine, :3] = narrow.view(np.int64)
    words[mine, first : first + 4] = found[:, :4].astype(np.int64)
