"""Statistics of many tensors by a few torch operations, for devices without a kernel of their own.

A gradient buffer has a segment a parameter: reducing them one by one is a thousand small operations. Here the memory is
reduced in rows, whole as it lies, and rows are put together by tables that say what belongs to whom. Nothing is read
back, temporaries are bounded, and the order of additions is always the same. Called by `measure.many`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from msprobe_megatron.job.measure.tables import on_device
from msprobe_megatron.run_directory.digest import integer_sum

ROW = 256
"""Elements that are reduced together first."""
FAN = 64
"""Partial results that are put together at once."""
PIECE = 1 << 22
"""Elements in work at once: about 32 MiB for each float64 temporary."""
APART = 1 << 12
"""Elements between two segments that are read for nothing rather than made two readings of."""
SMALL = 1 << 18
"""Tensors up to this size that lie alone are copied next to each other; larger ones are read where they lie."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_Partial = tuple[torch.Tensor, torch.Tensor]  # low, high, sum, squares of each; four counts of each


class Stretch(NamedTuple):
    """Memory that is read in one go, and the segments [start, stop) in it of the tensors at some positions.

    ``copied``: the tensors lie apart and are copied one after the other.
    """

    positions: list[int]
    segments: list[tuple[int, int]]
    length: int
    copied: bool


def plan_stretches(tensors: Sequence[torch.Tensor]) -> list[Stretch]:
    """Which tensors are read together; all are contiguous and not empty."""
    found: list[Stretch] = []
    alone: dict[torch.dtype, list[int]] = {}
    run: list[int] = []
    for i, tensor in enumerate(tensors):
        if run and not _follows(tensors[run[-1]], tensor):
            _end_run(tensors, run, found, alone)
            run = []
        run.append(i)
    if run:
        _end_run(tensors, run, found, alone)
    for positions in alone.values():
        found += _copied(tensors, positions)
    return found


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.dtype is not after.dtype or before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr():
        return False
    return 0 <= after.storage_offset() - before.storage_offset() - before.numel() <= APART


def _end_run(
    tensors: Sequence[torch.Tensor], run: list[int], found: list[Stretch], alone: dict[torch.dtype, list[int]]
) -> None:
    first = tensors[run[0]]
    if len(run) == 1 and first.numel() <= SMALL:
        alone.setdefault(first.dtype, []).append(run[0])
        return
    starts = [int(tensors[i].storage_offset() - first.storage_offset()) for i in run]
    segments = [(start, start + int(tensors[i].numel())) for start, i in zip(starts, run, strict=True)]
    found.append(Stretch(list(run), segments, segments[-1][1], copied=False))


def _copied(tensors: Sequence[torch.Tensor], positions: Sequence[int]) -> Iterator[Stretch]:
    mine: list[int] = []
    segments: list[tuple[int, int]] = []
    for i in positions:
        start = segments[-1][1] if segments else 0
        if mine and start + tensors[i].numel() > PIECE:
            yield Stretch(mine, segments, start, copied=True)
            mine, segments, start = [], [], 0
        mine.append(i)
        segments.append((start, start + tensors[i].numel()))
    if mine:
        yield Stretch(mine, segments, segments[-1][1], copied=True)


class Segments:
    """Statistics of the same tensors, step after step."""

    def __init__(self, tensors: Sequence[torch.Tensor], wide: torch.dtype) -> None:
        self._wide = wide
        device = tensors[0].device
        self._stretches = [(stretch, _Tables(stretch, device)) for stretch in plan_stretches(tensors)]
        order = [i for stretch, _ in self._stretches for i in stretch.positions]
        back = sorted(range(len(order)), key=order.__getitem__)
        in_order = back == list(range(len(order)))
        self._back = None if in_order else on_device(torch.tensor(back, dtype=torch.int64), device)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> _Partial:
        """Read them all."""
        parts = [self._one(stretch, tables, tensors) for stretch, tables in self._stretches]
        floats, counts = parts[0] if len(parts) == 1 else (torch.cat([p[k] for p in parts]) for k in (0, 1))
        if self._back is not None:
            floats, counts = floats.index_select(0, self._back), counts.index_select(0, self._back)
        largest = torch.maximum(floats[:, 1:2], -floats[:, :1])
        return torch.cat((floats, largest), 1), counts

    def _one(self, stretch: Stretch, tables: _Tables, tensors: Sequence[torch.Tensor]) -> _Partial:
        if stretch.copied:
            memory = torch.cat([tensors[i].reshape(-1) for i in stretch.positions])
        else:
            first = tensors[stretch.positions[0]]
            memory = first.as_strided((stretch.length,), (1,), first.storage_offset())
        return tables.reduce(memory, self._wide)


class _Tables:
    """What belongs to whom in a stretch: made once, on the device.

    Rows of `ROW` elements that lie wholly in a segment are read as they are. What is left of a segment at its two ends,
    less than a row each, is gathered; then partial results are put together by `FAN` until each segment has one.
    """

    def __init__(self, stretch: Stretch, device: torch.device) -> None:
        self._rows = stretch.length // ROW
        ends: list[tuple[int, int]] = []
        items: list[list[int]] = []
        for start, stop in stretch.segments:
            first, last = -(-start // ROW), stop // ROW
            mine = list(range(first, last))
            for a, b in ((start, min(stop, first * ROW)), (max(last * ROW, min(stop, first * ROW)), stop)):
                if a < b:
                    mine.append(self._rows + len(ends))
                    ends.append((a, b - a))
            items.append(mine)
        self._ends = on_device(torch.tensor(ends, dtype=torch.int64).reshape(-1, 2), device)
        self._within = torch.arange(ROW, device=device)
        self._last = stretch.length - 1
        self._levels: list[torch.Tensor] = []
        nothing = self._rows + len(ends)
        while any(len(mine) > 1 for mine in items):
            widest = min(FAN, max(map(len, items)))
            table: list[list[int]] = []
            above: list[list[int]] = []
            for mine in items:
                some = [mine[k : k + widest] for k in range(0, len(mine), widest)]
                above.append(list(range(len(table), len(table) + len(some))))
                table += [part + [nothing] * (widest - len(part)) for part in some]
            self._levels.append(on_device(torch.tensor(table, dtype=torch.int64), device))
            items, nothing = above, len(table)
        chosen = [mine[0] for mine in items]
        in_order = chosen == list(range(nothing))
        self._chosen = None if in_order else on_device(torch.tensor(chosen, dtype=torch.int64), device)

    def reduce(self, memory: torch.Tensor, wide: torch.dtype) -> _Partial:
        """Low, high, sum and sum of squares of each segment, and its four counts."""
        whole, some = memory[: self._rows * ROW].view(-1, ROW), PIECE // ROW
        parts = [_reduced(rows, None, wide) for rows in torch.split(whole, some)]
        for ends in torch.split(self._ends, some):
            if len(ends):
                places = (ends[:, :1] + self._within).clamp_(max=self._last)
                inside = self._within < ends[:, 1:]
                parts.append(_reduced(memory[places], inside, wide))
        parts = [part for part in parts if len(part[0])]
        floats, counts = (torch.cat([part[k] for part in parts]) for k in (0, 1))
        for table in self._levels:
            floats, counts = _together(floats, counts, table)
        if self._chosen is None:
            return floats, counts
        return floats.index_select(0, self._chosen), counts.index_select(0, self._chosen)


def _reduced(rows: torch.Tensor, inside: torch.Tensor | None, wide: torch.dtype) -> _Partial:
    if rows.dtype not in (torch.float32, torch.float64):
        rows = rows.to(torch.float32)
    finite = torch.isfinite(rows)
    odd = [torch.isnan(rows), rows == torch.inf, rows == -torch.inf, rows == 0]
    if inside is not None:
        finite = finite & inside
        odd = [some & inside for some in odd]
    low = torch.where(finite, rows, torch.inf).amin(1).to(wide)
    high = torch.where(finite, rows, -torch.inf).amax(1).to(wide)
    clean = torch.where(finite, rows, 0).to(wide)
    floats = torch.stack((low, high, clean.sum(1), (clean * clean).sum(1)), 1)
    return floats, torch.stack([some.sum(1) for some in odd], 1)


def _together(floats: torch.Tensor, counts: torch.Tensor, table: torch.Tensor) -> _Partial:
    # One more line that changes nothing, for the places of the table that are empty.
    none = torch.zeros_like(floats[:1])
    none[:, :1].fill_(torch.inf)
    none[:, 1:2].fill_(-torch.inf)
    some = torch.cat((floats, none))[table]
    found = torch.cat((some[..., :1].amin(1), some[..., 1:2].amax(1), some[..., 2:].sum(1)), 1)
    return found, integer_sum(torch.cat((counts, torch.zeros_like(counts[:1])))[table], 1)
