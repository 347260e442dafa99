"""Reading one saved tensor out of a packed file: its bytes and nothing else.

A row's `tensor` is the key ``pack:number``; the file of the pack has an index in front. No torch is needed.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analyse.load import Run, RunError
from msprobe_megatron.record.tensors_layout import file_name

_LARGEST_INDEX = 1 << 30
_NUMPY = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1"},
    **{"U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "BOOL": "|b1", "C64": "<c8"},
}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor as it was saved: dtype in the words of safetensors, shape, and the bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def numpy(self) -> npt.NDArray[Any]:
        """The values; bf16, for which NumPy has no type, as float32. 8-bit floats stay bytes.

        Example::

            read_tensor(run, 10, 3, "0:7").numpy().mean()
        """
        if self.dtype == "BF16":
            words = np.frombuffer(self.data, "<u2").astype("<u4") << 16
            return words.view("<f4").reshape(self.shape)
        return np.frombuffer(self.data, _NUMPY.get(self.dtype, "<u1")).reshape(self.shape)


def read_tensor(run: Run, step: int, rank: int, key: str) -> SavedTensor:
    """The tensor that a row of this step and rank points to; raises `RunError` if it is not there.

    Example::

        read_tensor(open_run("probe_out"), step=10, rank=3, key="0:7").shape
    """
    pack, _, number = key.partition(":")
    if not pack.isdigit() or not number.isdigit():
        raise RunError(f"tensor {key!r}: is not a key; accepted: pack:number, as in the column tensor")
    path = run.path / f"step_{step:06d}" / f"rank_{rank:05d}" / file_name(int(pack))
    try:
        return _read(path, key)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise RunError(f"{path}: tensor {key!r} cannot be read: {type(error).__name__}: {error}") from error


def _read(path: Path, key: str) -> SavedTensor:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _LARGEST_INDEX:
            raise ValueError(f"an index of {length} bytes")
        entry = json.loads(file.read(length))[key]
        first, last = entry["data_offsets"]
        file.seek(8 + length + first)
        data = file.read(last - first)
    if len(data) != last - first:
        raise ValueError(f"{len(data)} of {last - first} bytes")
    return SavedTensor(entry["dtype"], tuple(entry["shape"]), data)
