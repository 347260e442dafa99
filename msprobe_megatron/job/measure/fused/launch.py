"""Launching the fused kernel: one launch a tensor, or one for many contiguous tensors of a dtype.

Needs Triton. What a launch needs besides the tensor is worked out once for a dtype, shape, strides and numbering, and
kept for each stream: working memory must not be shared by streams, whose kernels may run at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from msprobe_megatron.job.measure.flatten import compact, is_dense
from msprobe_megatron.job.measure.fused import kernel
from msprobe_megatron.job.measure.plans import Dim, in_memory_order, joined_dims, numbers_of
from msprobe_megatron.run_directory.digest import Numbering, complex_numbering

STATISTICS, DIGEST = -1, 0
"""What to measure, in place of a number of cells of a sketch: statistics only, or these and the digest."""
_NAMES = {
    "float32": kernel.FLOAT32,
    "float64": kernel.FLOAT64,
    "bfloat16": kernel.BFLOAT16,
    "float16": kernel.FLOAT16,
    "int8": kernel.SIGNED,
    "int16": kernel.SIGNED,
    "int32": kernel.SIGNED,
    "int64": kernel.SIGNED,
    "uint8": kernel.UNSIGNED,
    "uint16": kernel.UNSIGNED,
    "uint32": kernel.UNSIGNED,
    "uint64": kernel.UNSIGNED,
    "bool": kernel.BOOL,
    "float8_e4m3fn": kernel.E4M3FN,
    "float8_e5m2": kernel.E5M2,
    "float8_e4m3fnuz": kernel.E4M3FNUZ,
    "float8_e5m2fnuz": kernel.E5M2FNUZ,
    "float8_e8m0fnu": kernel.E8M0FNU,
}
KINDS: dict[torch.dtype, int] = {
    getattr(torch, name): int(kind.value) for name, kind in _NAMES.items() if hasattr(torch, name)
}
_WARPS = 4
_LINE = (int(kernel.FLOAT_PARTS.value) + int(kernel.COUNT_PARTS.value)) * 8
_CELL_BYTES = 1 << 20
_MOST_CHUNKS = int(kernel.MOST_PROGRAMS.value)
_MOST_CHUNKS_OF_MANY = (2 << 20) // _LINE
_KEPT = 4096


def shape_of_block(width: int, *, strided: bool = False) -> tuple[int, int]:
    """Rows and columns of what a program reads at once; a row is a vector of 16 bytes.

    Elements that lie apart are read one by one, and their positions need the registers.
    """
    return (256, 2) if strided else (256, 16 // width)


class _Plan(NamedTuple):
    """How tensors of a dtype, shape, strides and numbering are read."""

    numel: int
    times: int
    tiles: int
    chunks: int
    first: int
    step: int
    words: torch.Tensor | None
    constants: tuple[Any, ...]
    held: Any


def _options(device: torch.device) -> dict[str, Any]:
    """Options of a launch. Without fused multiply-adds all devices round alike; not every compiler has the choice."""
    return {"num_warps": _WARPS, "enable_fp_fusion": False} if device.type == "cuda" else {"num_warps": _WARPS}


class Stream:
    """Working memory and plans of one stream of a device: 4 MiB at most."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._options = device, _options(device)
        with torch.inference_mode(False), torch.no_grad():
            self._memory = torch.zeros(_MOST_CHUNKS * _LINE // 8 + 1, dtype=torch.int64, device=device)
            self._cells = torch.empty(0, dtype=torch.int64, device=device)
            self._partials = torch.empty(0, dtype=torch.int64, device=device)
        self._plans: dict[Any, _Plan] = {}

    def partials(self, chunks: int) -> torch.Tensor:
        """Memory for the partial results of a `Table`: one for all tables, whose launches the stream keeps in order."""
        if self._partials.numel() < chunks * _LINE // 8:
            with torch.inference_mode(False), torch.no_grad():
                self._partials = torch.empty(chunks * _LINE // 8, dtype=torch.int64, device=self._device)
        return self._partials

    def measure(
        self, x: torch.Tensor, row: torch.Tensor, *, wide: bool, cells: int, numbering: Numbering | None = None
    ) -> None:
        """Fill ``row``, the 64-bit words of a slot, from a real tensor of a dtype in `KINDS`.

        ``wide``: floats of the row are float64. ``cells``: STATISTICS, DIGEST or the number of cells of a sketch.
        """
        key = (x.dtype, x.shape, x.stride(), id(numbering), cells, wide)
        plan = self._plans.get(key) or self._new_plan(key, x, numbering)
        data, memory = x.data_ptr(), self._memory.data_ptr()
        kernel.measure_tensor[(plan.chunks,)](
            data,
            plan.numel,
            plan.times,
            plan.tiles,
            row.data_ptr(),
            memory + 8,
            self._cells.data_ptr(),
            memory,
            0 if plan.words is None else plan.words.data_ptr(),
            plan.first,
            plan.step,
            *plan.constants,
            plan.words is None and data % 16 == 0,
            *shape_of_block(x.dtype.itemsize, strided=plan.words is not None),
            **self._options,
        )

    def _new_plan(self, key: Any, x: torch.Tensor, numbering: Numbering | None) -> _Plan:
        if len(self._plans) >= _KEPT:
            self._plans.clear()
        dtype, shape, strides, _, cells, wide = key
        numel, times = x.numel(), 1
        if cells != STATISTICS:
            dims = joined_dims(shape, strides, numbering)
        else:
            x, times = compact(x)  # an expanded tensor is read once
            numel = x.numel()
            dims = [Dim(numel, 1, 1, ((0, numel, 0),))]
            if not is_dense(x):
                dims = joined_dims(*in_memory_order(x.shape, x.stride()), None)
        most = _MOST_CHUNKS if cells <= 0 else max(1, min(_MOST_CHUNKS, _CELL_BYTES // (8 * cells)))
        flat = not numel or not dims or (len(dims) == 1 and dims[0].stride == 1 and len(dims[0].segments) == 1)
        rows, columns = shape_of_block(dtype.itemsize, strided=not flat)
        tiles = max(1, -(-numel // (rows * columns * most)))
        chunks = max(1, -(-numel // (rows * columns * tiles)))
        if cells > 0 and self._cells.numel() < chunks * cells:
            with torch.inference_mode(False), torch.no_grad():
                self._cells = torch.empty(chunks * cells, dtype=torch.int64, device=self._device)
        words, source = (None, None) if flat else self._words(dims)
        first, step = (dims[0].segments[0][2], dims[0].step) if dims and flat and numel else (0, 1)
        constants = (KINDS[dtype], dtype.itemsize, wide, cells != STATISTICS, max(cells, 0), not flat)
        held = (numbering, source)  # the identity of the numbering is part of the key
        plan = _Plan(numel, times, tiles, chunks, first, step, words, constants, held)
        self._plans[key] = plan
        return plan

    def _words(self, dims: Sequence[Dim]) -> tuple[torch.Tensor, torch.Tensor]:
        """The words of `kernel._walk` and the tables behind them, on the device."""
        inner_first = dims[::-1]
        tables = [numbers_of(dim) if len(dim.segments) > 1 else [] for dim in inner_first]
        first = sum(dim.segments[0][2] for dim in dims if len(dim.segments) == 1)
        at = 2 + 4 * len(dims)
        with torch.inference_mode(False), torch.no_grad():
            found = torch.empty(at + sum(map(len, tables)), dtype=torch.int64, device=self._device)
        words = [len(dims), first]
        for dim, table in zip(inner_first, tables, strict=True):
            words += [dim.size, dim.stride, dim.step, found.data_ptr() + 8 * at if table else 0]
            at += len(table)
        return found, send([*words, *(number for table in tables for number in table)], found)


def send(words: list[int], to: torch.Tensor) -> torch.Tensor:
    """Write words to a device without making the host wait for it.

    Returns the source, to be kept with the target: not every allocator keeps memory that a copy is still to read.
    """
    with torch.inference_mode(False), torch.no_grad():
        host = torch.tensor(words, dtype=to.dtype, device="cpu")
        if not to.is_cpu:
            with contextlib.suppress(RuntimeError):  # in some threads of torch_npu, where the copy then waits
                host = host.pin_memory()
        to.copy_(host, non_blocking=host.is_pinned() if not to.is_cpu else False)
    return host


class Table:
    """Tensors that are measured together, one launch for each of their dtypes; remembers where they are.

    The tensors are contiguous, of one device and of dtypes in `KINDS`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], rows: Sequence[int], stream: Stream, *, wide: bool) -> None:
        self._stream = stream
        groups: dict[tuple[torch.dtype, bool], list[int]] = {}
        for i, tensor in enumerate(tensors):
            groups.setdefault((tensor.dtype, tensor.data_ptr() % 16 == 0), []).append(i)
        self._launches = [
            self._launch([tensors[i] for i in mine], [rows[i] for i in mine], wide, aligned)
            for (_, aligned), mine in groups.items()
        ]

    def __call__(self) -> None:
        """Measure them all."""
        for launch in self._launches:
            launch()

    def _launch(
        self, tensors: Sequence[torch.Tensor], rows: Sequence[int], wide: bool, aligned: bool
    ) -> Callable[[], None]:
        dtype, device = tensors[0].dtype, tensors[0].device
        lines, columns = shape_of_block(dtype.itemsize)
        block = lines * columns
        # As many chunks as fit the working memory, at least one a tensor.
        tiles = max(1, -(-sum(t.numel() for t in tensors) // (block * _MOST_CHUNKS_OF_MANY)))
        words: list[int] = []
        owners: list[int] = []
        for job, (tensor, row) in enumerate(zip(tensors, rows, strict=True)):
            mine = max(tiles, -(-tensor.numel() // (block * _MOST_CHUNKS)))
            chunks = max(1, -(-tensor.numel() // (block * mine)))
            words += [tensor.data_ptr(), tensor.numel(), row, len(owners), chunks, mine, 0, 0]
            owners += [job] * chunks
        with torch.inference_mode(False), torch.no_grad():
            jobs = torch.empty(len(words), dtype=torch.int64, device=device)
            owner = torch.empty(len(owners), dtype=torch.int32, device=device)
            counters = torch.zeros(len(tensors), dtype=torch.int32, device=device)
        sources = (send(words, jobs), send(owners, owner))
        partials = self._stream.partials(len(owners))
        addresses = (jobs.data_ptr(), owner.data_ptr(), partials.data_ptr(), counters.data_ptr())
        constants = (KINDS[dtype], dtype.itemsize, wide, aligned, *shape_of_block(dtype.itemsize))
        held = (jobs, owner, partials, counters, sources)

        def launch(held: Any = held) -> None:
            kernel.measure_many[(len(owners),)](*addresses, *constants, **_options(device))

        return launch


def real(x: torch.Tensor, numbering: Numbering | None) -> tuple[torch.Tensor, Numbering | None]:
    """A tensor without complex numbers and lazy signs, and its numbering."""
    if x.is_complex():
        x, numbering = torch.view_as_real(x.resolve_conj()), complex_numbering(numbering)
    return (x.resolve_neg() if x.is_neg() else x), numbering
