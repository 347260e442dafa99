"""Statistics on the CPU, in pieces that stay in cache and with as few calls of ATen as can be.

A training step measures a thousand tensors of a few thousand elements, so the cost is that of calling, not
of reading. Hence scratch memory made once a thread, ``out=`` everywhere, several sums in one reduction over
the rows of a scratch matrix, and a reading of the few results through a NumPy view of that scratch (host
memory: no operation, no synchronisation). Only a piece whose results show a NaN, an infinity or a magnitude
that float32 squares cannot hold is read again, in float64 and masked.

Precision: float32 by ATen's cascade summation inside a piece, float64 across pieces; integers, bool and
float64 in float64 throughout, so that sums of integers are exact up to 2**53.
"""

from __future__ import annotations

import struct
import threading

import torch

from msprobe_megatron.measure.flatten import flat_pieces

PIECE = 1 << 16
"""Elements in work at once, 256 KiB of float32: with its scratch rows a piece stays in a second-level cache.
Smaller pieces lose more to calls than they win; measured from 2**13 to 2**17."""

_VIEWS_KEPT = 1024
_FLOAT32_FROM = 2.0**-40
_FLOAT32_TO = 2.0**55
_INF = float("inf")
_pack_floats = struct.Struct("5d").pack_into
_pack_counts = struct.Struct("4q").pack_into

_Totals = tuple[float, float, float, float, int, int, int, int]  # min max sum sumsq nan posinf neginf zero
_NOTHING: _Totals = (_INF, -_INF, 0.0, 0.0, 0, 0, 0, 0)


class _Views:
    """The scratch rows cut to one number of elements, and the first of them in one shape."""

    __slots__ = ("first", "pair", "second", "shaped", "third", "triple")

    def __init__(self, memory: torch.Tensor, shape: torch.Size) -> None:
        numel = shape.numel()
        self.triple = memory[: 3 * numel].view(3, numel)
        self.first, self.second, self.third = self.triple.unbind(0)
        self.pair = self.triple[1:]
        self.shaped = self.first.view(shape)


class _Scratch:
    """Working memory of one thread for one dtype of work."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.low_limit, self.high_limit = (
            (_FLOAT32_FROM, _FLOAT32_TO) if dtype is torch.float32 else (0.0, torch.finfo(dtype).max)
        )
        self.memory = torch.zeros(3 * PIECE, dtype=dtype, device="cpu")
        self.results = torch.zeros(5, dtype=dtype, device="cpu")
        self.host = self.results.numpy()  # made once; later only read, while nothing else writes
        self.zero = torch.zeros((), dtype=dtype, device="cpu")
        self.inf = torch.full((), _INF, dtype=dtype, device="cpu")
        self.minus_inf = -self.inf
        self.low_high = (self.results[0], self.results[1])
        self.sum = self.results[2]
        self.squares_zeros = self.results[3:]
        self.sums = self.results[2:]
        self.views: dict[torch.Size, _Views] = {}

    def cut(self, shape: torch.Size) -> _Views:
        """Return the rows cut to ``shape``; shapes repeat step after step, so they are kept."""
        views = self.views.get(shape)
        if views is None:
            if len(self.views) >= _VIEWS_KEPT:
                self.views.clear()
            views = self.views[shape] = _Views(self.memory, shape)
        return views

    def trusted(self, low: float, high: float) -> bool:
        """Say whether plain reductions of a piece with these extremes are right; a NaN compares false."""
        limit = self.high_limit
        return -limit <= low and high <= limit and (max(-low, high) >= self.low_limit or low == high == 0.0)


class _ThreadScratch(threading.local):
    # Tensor operations let other threads run, and the autograd engine has threads of its own.
    def __init__(self) -> None:
        # Tensors born in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            self.float32 = _Scratch(torch.float32)
            self.float64 = _Scratch(torch.float64)
            self.floats = torch.zeros(5, dtype=torch.float64, device="cpu")
            self.counts = torch.zeros(4, dtype=torch.int64, device="cpu")
        self.floats_host = self.floats.numpy().data
        self.counts_host = self.counts.numpy().data


_scratch = _ThreadScratch()


def measure_cpu(x: torch.Tensor, times: int, floats: torch.Tensor, counts: torch.Tensor) -> None:
    """Write the statistics of real, non-empty ``x``, each element standing for ``times``, into the two slots.

    ``x`` must be detached: writing to ``out=`` from a tensor that requires a gradient is an error.

    Example::

        floats, counts = torch.empty(5, dtype=torch.float64), torch.empty(4, dtype=torch.int64)
        measure_cpu(torch.tensor([1.0, 2.0]), 1, floats, counts)   # floats = [1, 2, 3, 5, 2]
    """
    mine = _scratch
    dtype = x.dtype
    narrow = dtype.is_floating_point and dtype is not torch.float64
    scratch = mine.float32 if narrow else mine.float64
    if x.numel() <= PIECE:
        totals = _measure_copied(x, scratch, mine.float64)
    else:
        totals = _measure_large(x, scratch, mine.float64)
    low, high, total, squares, n_nan, n_posinf, n_neginf, n_zero = totals
    if times != 1:
        total, squares = total * times, squares * times
        n_nan, n_posinf, n_neginf, n_zero = n_nan * times, n_posinf * times, n_neginf * times, n_zero * times
    _pack_floats(mine.floats_host, 0, low, high, total, squares, high if high > -low else -low)
    _pack_counts(mine.counts_host, 0, n_nan, n_posinf, n_neginf, n_zero)
    # Slots may be on an accelerator all the same (token ids, masks). CUDA stages so small a copy from
    # pageable memory before it returns: it may be asynchronous though the scratch is written again soon.
    floats.copy_(mine.floats, floats.is_cuda)
    counts.copy_(mine.counts, counts.is_cuda)


def _measure_copied(x: torch.Tensor, scratch: _Scratch, wide: _Scratch) -> _Totals:
    # The copy brings any dtype and any strides into a row that one reduction sums with the two others.
    views = scratch.cut(x.shape)
    views.shaped.copy_(x)
    row = views.first
    torch.aminmax(row, out=scratch.low_high)
    torch.mul(row, row, out=views.second)
    torch.eq(row, scratch.zero, out=views.third)
    torch.sum(views.triple, 1, out=scratch.sums)
    low, high, total, squares, zeros = scratch.host.tolist()
    if scratch.trusted(low, high):
        return low, high, total, squares, 0, 0, 0, int(zeros)
    return _measure_masked(row, wide)


def _measure_direct(row: torch.Tensor, scratch: _Scratch, wide: _Scratch) -> _Totals:
    # As above without the copy, for a piece that already is flat and of the dtype of the work.
    views = scratch.cut(row.shape)
    torch.aminmax(row, out=scratch.low_high)
    torch.mul(row, row, out=views.second)
    torch.eq(row, scratch.zero, out=views.third)
    torch.sum(row, 0, out=scratch.sum)
    torch.sum(views.pair, 1, out=scratch.squares_zeros)
    low, high, total, squares, zeros = scratch.host.tolist()
    if scratch.trusted(low, high):
        return low, high, total, squares, 0, 0, 0, int(zeros)
    return _measure_masked(row, wide)


def _measure_large(x: torch.Tensor, scratch: _Scratch, wide: _Scratch) -> _Totals:
    low, high, total, squares, n_nan, n_posinf, n_neginf, n_zero = _NOTHING
    measure = _measure_direct if x.dtype is scratch.memory.dtype else _measure_copied
    for flat in flat_pieces(x):
        for piece in torch.split(flat, PIECE):
            part = measure(piece, scratch, wide)
            low = part[0] if part[0] < low else low
            high = part[1] if part[1] > high else high
            total += part[2]
            squares += part[3]
            n_nan += part[4]
            n_posinf += part[5]
            n_neginf += part[6]
            n_zero += part[7]
    return low, high, total, squares, n_nan, n_posinf, n_neginf, n_zero


def _measure_masked(row: torch.Tensor, wide: _Scratch) -> _Totals:
    # ``row`` may be the first row of the very scratch in use; the copy onto itself is then a no-op.
    views = wide.cut(row.shape)
    data, work, host, numel = views.first, views.second, wide.host, row.numel()
    data.copy_(row)

    def count(other: torch.Tensor) -> int:
        torch.eq(data, other, out=work)
        torch.sum(work, 0, out=wide.sum)
        return int(host[2])

    n_nan, n_posinf, n_neginf, n_zero = (
        numel - count(data),
        count(wide.inf),
        count(wide.minus_inf),
        count(wide.zero),
    )
    torch.nan_to_num(data, _INF, _INF, _INF, out=work)
    torch.amin(work, 0, out=wide.low_high[0])
    torch.nan_to_num(data, -_INF, -_INF, -_INF, out=work)
    torch.amax(work, 0, out=wide.low_high[1])
    torch.nan_to_num(data, 0.0, 0.0, 0.0, out=work)
    torch.sum(work, 0, out=wide.sum)
    torch.mul(work, work, out=work)
    torch.sum(work, 0, out=wide.squares_zeros[0])
    low, high, total, squares, _ = host.tolist()
    return low, high, total, squares, n_nan, n_posinf, n_neginf, n_zero
