"""Whole tensors in packed safetensors files, several tensors per file.

A probe adds copies to a pack; a full pack goes to the writer thread like a step does, so that memory stays bounded and
training continues. A row holds the key ``pack:number`` of its tensor. Bytes are written unconverted, bf16 and fp8 too.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

import torch

from msprobe_megatron.job.record.writer import Batch, WriterCounts
from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.run_directory.safe_files import Unfinished
from msprobe_megatron.run_directory.tensor_names import file_name

if TYPE_CHECKING:
    from msprobe_megatron.job.devices.base import HostCopy

PACK_BYTES = 64 << 20
"""A pack is submitted when it holds this much: it is written while training continues."""
_ALIGNED = 64
_AT_ONCE = 8 << 20

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
}


class HostBuffers:
    """A pool of buffers for copies of tensors that are already in host memory.

    Fresh memory costs as much as the copy itself, because the kernel has to clear it.
    """

    def __init__(self, size: int, keep: int = 8) -> None:
        self._size, self._keep = size, keep
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """Return a free buffer."""
        try:
            return self._free.pop()
        except IndexError:
            return _fresh(self._size)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool once its pack is written or dropped. Thread-safe."""
        if len(self._free) < self._keep:
            self._free.append(buffer)


def _fresh(size: int) -> torch.Tensor:
    """New memory in huge pages if available: page faults of 4 KiB each take longer than the copy."""
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)
    except (AttributeError, OSError, ValueError):  # no huge pages on this system
        return torch.empty(size, dtype=torch.uint8)


@dataclass(frozen=True)
class _Copied:
    """A finished copy."""

    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The copy."""
        return self.tensor


@dataclass
class TensorPack(Batch):
    """Copies of tensors of one step that go into one file."""

    large = True

    step: int
    number: int
    copies: list[tuple[str, str, tuple[int, ...], HostCopy]] = field(default_factory=list)
    held_bytes: int = 0
    buffers: HostBuffers | None = None
    _buffer: torch.Tensor | None = None
    _used: int = 0

    @property
    def nbytes(self) -> int:
        """Host memory that the copies take."""
        return self.held_bytes

    def add(self, key: str, x: torch.Tensor, copy: HostCopy) -> None:
        """Add a copy of ``x`` (contiguous, on its way to the host) under ``key``."""
        name = str(x.dtype).removeprefix("torch.")
        self.copies.append((key, _NAMES.get(name, f"U8:{name}"), tuple(x.shape), copy))
        self.held_bytes += x.numel() * x.element_size()

    def copied(self, x: torch.Tensor) -> HostCopy | None:
        """A copy of a tensor in host memory, in the buffer of the pack; None if it does not fit."""
        if self.buffers is None or type(x) is not torch.Tensor or x.device.type != "cpu" or x.numel() == 0:
            return None
        if x.layout is not torch.strided:
            return None
        if self._buffer is None:
            self._buffer = self.buffers.take()
        size, at = x.numel() * x.element_size(), self._used
        if at + size > self._buffer.numel():
            return None
        self._used = at + -(-size // _ALIGNED) * _ALIGNED
        copy = self._buffer[at : at + size].view(x.dtype).view(x.shape)
        copy.copy_(x)
        return _Copied(copy)

    def _give_back(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None and self.buffers is not None:
            self.buffers.give(buffer)

    def expected_bytes(self, last: int) -> int:
        """As many bytes as it holds."""
        return self.held_bytes

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Write the pack as one file of its step."""
        size = directory.write_file(self._path(identity), self.fill)
        self._give_back()
        return size

    def begin(self, directory: RunDirectory, identity: Mapping[str, int]) -> Unfinished:
        """Write the file without syncing it; the memory of the copies is free then."""
        file = directory.begin_file(self._path(identity), self.fill)
        self._give_back()
        return file

    def _path(self, identity: Mapping[str, int]) -> str:
        return f"step_{self.step:06d}/rank_{identity['rank']:05d}/{file_name(self.number)}"

    def count(self, counts: WriterCounts) -> None:
        """Add the tensors."""
        counts.tensors_written += len(self.copies)

    def drop(self, counts: WriterCounts) -> None:
        """Add the lost tensors."""
        counts.tensors_dropped += len(self.copies)
        self._give_back()

    def fill(self, file: IO[bytes]) -> None:
        """Write the pack; waits for copies that have not arrived yet."""
        pieces = [_bytes(copy.wait()) for _, _, _, copy in self.copies]
        header = _header(self.copies, [piece.nbytes for piece in pieces])
        file.write(header)
        started, written = 0, len(header)
        for piece in pieces:
            file.write(piece)
            written += piece.nbytes
            if written - started >= _AT_ONCE:
                _start_writing(file, started, written)
                started = written


def _start_writing(file: IO[bytes], first: int, last: int) -> None:
    """Start writeback of these bytes now: otherwise the disk would idle until the pack is synced."""
    file.flush()
    with contextlib.suppress(AttributeError, OSError):  # not supported by this system or file
        os.posix_fadvise(file.fileno(), first, last - first, os.POSIX_FADV_DONTNEED)


def _bytes(x: torch.Tensor) -> memoryview:
    if x.numel() == 0:
        return memoryview(b"")
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _header(copies: list[tuple[str, str, tuple[int, ...], HostCopy]], sizes: list[int]) -> bytes:
    entries: dict[str, object] = {}
    at = 0
    for (key, name, shape, _), size in zip(copies, sizes, strict=True):
        kind, _, odd = name.partition(":")
        # A dtype unknown to the format is stored as bytes; the row holds the true dtype.
        entries[key] = {"dtype": kind, "shape": [size] if odd else list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class TensorPacks:
    """The packs of a running step; full ones go to ``submit``."""

    def __init__(
        self,
        to_host: Callable[[torch.Tensor], HostCopy],
        submit: Callable[[TensorPack], object],
        pack_bytes: int = PACK_BYTES,
    ) -> None:
        self._to_host, self._submit, self._limit = to_host, submit, pack_bytes
        self._buffers = HostBuffers(pack_bytes)
        self._pack: TensorPack | None = None
        self._count = 0
        # The host may run the model in several threads: each tensor gets a key of its own, and none is added to a pack
        # that is being written.
        self._filling = threading.RLock()

    def add(self, step: int, x: torch.Tensor) -> str:
        """Copy ``x`` and return its key."""
        with self._filling:
            return self._add(step, x)

    def _add(self, step: int, x: torch.Tensor) -> str:
        size = x.numel() * x.element_size()
        pack = self._pack
        if pack is not None and pack.copies and pack.held_bytes + size > self._limit:
            self._hand_over()
            pack = None
        if pack is None:
            pack = self._pack = TensorPack(step, self._count, buffers=self._buffers)
            self._count += 1
        key = f"{pack.number}:{len(pack.copies)}"
        data = x.detach()
        with torch.inference_mode(False), torch.no_grad():
            copy = pack.copied(data)
        pack.add(key, data, self._to_host(data.contiguous()) if copy is None else copy)
        return key

    def finish(self) -> None:
        """The step is over: submit what is left; packs count from 0 again."""
        with self._filling:
            self._hand_over()
            self._count = 0

    def _hand_over(self) -> None:
        pack, self._pack = self._pack, None
        if pack is not None:
            self._submit(pack)
