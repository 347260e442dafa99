"""Checkpoints of Hugging Face: one safetensors file, or several with an index; read without torch.

A tensor is a view of the mapped file. Files are data from strangers: headers are limited, offsets checked, and names
in an index are those of files beside it.
"""

from __future__ import annotations

import json
import math
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_megatron.analysis.checkpoints.held import PARAMETER, Checkpoint, CheckpointError, CheckpointTensor
from msprobe_megatron.analysis.compare.pairs.elements import View

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LARGEST_HEADER = 256 << 20
_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U8": "<u1",
    "BOOL": "|b1",
    "F8_E4M3": "<u1",
    "F8_E5M2": "<u1",
}


def holds_safetensors(directory: Path) -> bool:
    """Whether a directory holds a checkpoint of Hugging Face."""
    return (directory / INDEX).is_file() or any(directory.glob("*.safetensors"))


def open_safetensors(directory: Path) -> Checkpoint:
    """Read the headers of all files of a checkpoint."""
    files = _indexed(directory) if (directory / INDEX).is_file() else sorted(directory.glob("*.safetensors"))
    found = Checkpoint(directory, "safetensors", None)
    for file in files:
        for name, (dtype, shape, start, size) in _header(file).items():
            reason = "" if dtype in _TYPES else f"elements of type {dtype}"
            found.tensors[PARAMETER, name] = CheckpointTensor(
                shape, partial(_view, file, dtype, shape, start, size), reason
            )
    found.settings = _settings(directory / "config.json")
    return found


def _indexed(directory: Path) -> list[Path]:
    index = directory / INDEX
    content = _json(index)
    names = content.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index}: has no weight_map; expected the index of a sharded checkpoint")
    files = []
    for name in sorted({str(value) for value in names.values()}):
        if Path(name).name != name or name in (".", ".."):
            raise CheckpointError(f"{index}: names {name[:60]!r}; accepted: files beside it")
        if not (directory / name).is_file():
            raise CheckpointError(f"{index}: names {name!r}, which is not there")
        files.append(directory / name)
    return files


def _settings(path: Path) -> dict[str, Any]:
    return _json(path) if path.is_file() else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_HEADER:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes; accepted: at most {_LARGEST_HEADER}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {str(error)[:120]}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return content


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Type, shape, first byte and number of bytes of every tensor of a file."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(_LARGEST_HEADER, size):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = (int(n) for n in entry["data_offsets"])
            shape = tuple(int(n) for n in entry["shape"])
            start = 8 + length + first
            if not 0 <= first <= last or start + last - first > size or any(n < 0 for n in shape):
                raise ValueError(f"{name!r} lies outside of the file")
            width = np.dtype(_TYPES[entry["dtype"]]).itemsize if entry["dtype"] in _TYPES else 0
            if width and math.prod(shape) * width != last - first:
                raise ValueError(f"{name!r} has {last - first} bytes for shape {shape}")
            found[str(name)] = (str(entry["dtype"]), shape, start, last - first)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise CheckpointError(f"{file}: is not a safetensors file: {str(error)[:120]}") from error


def _view(file: Path, dtype: str, shape: tuple[int, ...], start: int, size: int) -> View:
    if not size:
        return View(dtype, np.zeros(shape, _TYPES[dtype]))
    data = np.memmap(file, np.uint8, mode="r", offset=start, shape=(size,))
    return View(dtype, np.asarray(data).view(_TYPES[dtype]).reshape(shape))
