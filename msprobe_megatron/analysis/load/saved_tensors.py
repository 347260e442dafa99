"""Reading saved tensors from packed files: a single one by its bytes, or many as views of mapped files.

A row's `tensor` is the key ``pack:number``; the file of the pack has an index in front. No torch is needed.
"""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.pairs.elements import View
from msprobe_megatron.analysis.load.run import Run, RunError
from msprobe_megatron.run_directory.tensor_names import file_name

_LARGEST_INDEX = 1 << 30
_NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U8": "<u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "BOOL": "|b1",
    "C64": "<c8",
}
_WORDS = {**_NUMPY, "BF16": "<u2"}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor as it was saved: dtype as safetensors names it, shape, and the bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def numpy(self) -> npt.NDArray[Any]:
        """The values; bf16, for which NumPy has no type, as float32. 8-bit floats stay bytes."""
        if self.dtype == "BF16":
            words = np.frombuffer(self.data, "<u2").astype("<u4") << 16
            return words.view("<f4").reshape(self.shape)
        return np.frombuffer(self.data, _NUMPY.get(self.dtype, "<u1")).reshape(self.shape)


def read_tensor(run: Run, step: int, rank: int, key: str) -> SavedTensor:
    """The tensor that a row of this step and rank points to; raises `RunError` if it is not there."""
    path = _pack_of(run, step, rank, key)
    try:
        return _read(path, key)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise RunError(f"{path}: tensor {key!r} cannot be read: {type(error).__name__}: {error}") from error


def _pack_of(run: Run, step: int, rank: int, key: str) -> Path:
    pack, _, number = key.partition(":")
    if not pack.isdigit() or not number.isdigit():
        raise RunError(f"tensor {key!r}: is not a key; accepted: pack:number, as in the column tensor")
    return run.path / f"step_{step:06d}" / f"rank_{rank:05d}" / file_name(int(pack))


def _index(file: Any) -> tuple[dict[str, Any], int]:
    """Index of a pack, and where its data begin."""
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _LARGEST_INDEX:
        raise ValueError(f"an index of {length} bytes")
    index = json.loads(file.read(length))
    if not isinstance(index, dict):
        raise ValueError("an index that is no object")
    return index, 8 + length


class TensorFiles:
    """Saved tensors of a run as views: files are mapped, not read, and the last few stay mapped."""

    def __init__(self, run: Run, most_open: int = 128) -> None:
        self._run, self._most = run, most_open
        self._open: OrderedDict[Path, tuple[dict[str, Any], npt.NDArray[np.uint8]]] = OrderedDict()

    def view(self, step: int, rank: int, key: str, shape: tuple[int, ...]) -> View:
        """The tensor that a row points to, in the shape of the row; raises `RunError` if it is not there."""
        path = _pack_of(self._run, step, rank, key)
        try:
            index, data = self._mapped(path)
            entry = index[key]
            first, last = (int(n) for n in entry["data_offsets"])
            if not 0 <= first <= last <= len(data):
                raise ValueError(f"bytes {first} to {last} of {len(data)}")
            words = data[first:last].view(_WORDS.get(entry["dtype"], "<u1"))
            if words.size != math.prod(shape):
                raise ValueError(f"{words.size} elements where the row says {shape}")
            return View(str(entry["dtype"]), words.reshape(shape))
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise RunError(f"{path}: tensor {key!r} cannot be read: {type(error).__name__}: {error}") from error

    def _mapped(self, path: Path) -> tuple[dict[str, Any], npt.NDArray[np.uint8]]:
        found = self._open.get(path)
        if found is None:
            with path.open("rb") as file:
                index, start = _index(file)
            empty = path.stat().st_size == start
            data = np.zeros(0, np.uint8) if empty else np.memmap(path, np.uint8, mode="r", offset=start)
            found = self._open[path] = (index, np.asarray(data))
            if len(self._open) > self._most:
                self._open.popitem(last=False)
        self._open.move_to_end(path)
        return found


def _read(path: Path, key: str) -> SavedTensor:
    with path.open("rb") as file:
        index, start = _index(file)
        entry = index[key]
        first, last = entry["data_offsets"]
        file.seek(start + first)
        data = file.read(last - first)
    if len(data) != last - first:
        raise ValueError(f"{len(data)} of {last - first} bytes")
    return SavedTensor(entry["dtype"], tuple(entry["shape"]), data)
