"""torch_dist checkpoints: one index for all ranks (`.metadata`), and chunks of tensors in `__*.distcp` files.

A chunk says where in the whole tensor it lies, so nothing has to be known of the layout. Layers and experts are leading
dimensions there; here each has a name of its own.
"""

from __future__ import annotations

import io
import itertools
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from msprobe_megatron.analysis.checkpoints.canonical import KINDS, canonical, stacked
from msprobe_megatron.analysis.checkpoints.held import PARAMETER, Checkpoint, CheckpointError, CheckpointTensor, Key
from msprobe_megatron.analysis.checkpoints.plain_pickle import PickleError, Record, read_pickle
from msprobe_megatron.analysis.checkpoints.safe_load import load_tensor

_STATE = "optimizer.state."
Chunk = tuple[tuple[int, ...], tuple[int, ...], Path, int, int]
"""First element in the whole, sizes, file, first byte, number of bytes."""


def open_torch_dist(directory: Path, iteration: int | None) -> Checkpoint:
    """Read the index of a checkpoint."""
    index = directory / ".metadata"
    try:
        metadata = read_pickle(index.read_bytes())
        shapes, chunks = _shapes(metadata), _chunks(metadata, directory)
    except (OSError, PickleError, AttributeError, TypeError, IndexError) as error:
        raise CheckpointError(f"{index}: cannot be read: {error}") from error
    found = Checkpoint(directory, "torch_dist", iteration)
    files: dict[Path, int] = {}
    for key, shape in shapes.items():
        held = chunks.get(key, [])
        covered = sum(math.prod(sizes) for _, sizes, _, _, _ in held)
        reason = "" if covered == math.prod(shape) else f"{covered} of {math.prod(shape)} elements are in the files"
        if covered > _bytes_of(held, files):  # sizes that are only claimed: nothing is made of them
            found.tensors[_key(key)] = CheckpointTensor(
                shape, _Loader([], (), shape), "more elements than its files have bytes"
            )
            continue
        for name, place, rest in _each(key, shape):
            found.tensors[_key(name)] = CheckpointTensor(rest, _Loader(held, place, rest), reason)
    return found


def _shapes(metadata: Any) -> dict[str, tuple[int, ...]]:
    """Whole shapes of all tensors; what is no tensor has none."""
    found = {}
    for key, entry in metadata.get("state_dict_metadata").items():
        size = entry.get("size")
        if isinstance(size, Record):
            found[_name(key)] = _numbers(size)
    return found


def _chunks(metadata: Any, directory: Path) -> dict[str, list[Chunk]]:
    sizes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for key, entry in metadata.get("state_dict_metadata").items():
        for chunk in entry.get("chunks") or ():
            sizes[_name(key), _numbers(chunk.get("offsets"))] = _numbers(chunk.get("sizes"))
    found: dict[str, list[Chunk]] = defaultdict(list)
    for index, where in metadata.get("storage_data").items():
        offset = index.get("offset")
        if not isinstance(offset, Record):
            continue
        key, at = _name(index.get("fqn")), _numbers(offset)
        if (key, at) in sizes:
            name = _name(where.get("relative_path"))
            path = directory / name
            if name in ("", ".", "..") or path.parent != directory:
                raise CheckpointError(f"{directory}: names a file outside of it: {path}")
            found[key].append((at, sizes[key, at], path, int(where.get("offset")), int(where.get("length"))))
    return found


def _numbers(size: Record) -> tuple[int, ...]:
    """A torch.Size: it was made of one tuple."""
    found = tuple(int(n) for n in (size.arguments[0] if size.arguments else ()))
    if any(not 0 <= n < 1 << 62 for n in found) or len(found) > 64:
        raise PickleError("a size that no tensor has")
    return found


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise PickleError(f"{type(value).__name__} where a name was expected")
    return value


def _bytes_of(chunks: list[Chunk], files: dict[Path, int]) -> int:
    """What of the chunks can be in their files; `files` remembers the sizes of those."""
    for _, _, path, _, _ in chunks:
        if path not in files:
            files[path] = path.stat().st_size if path.is_file() else 0
    return sum(max(0, min(length, files[path] - first)) for _, _, path, first, length in chunks if first >= 0)


def _each(key: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Name, place along the leading dimensions, and remaining shape of every tensor that a key holds."""
    # Braces in a stranger's name are no places to fill in.
    text, count = stacked(key.replace("{", "{{").replace("}", "}}"))
    if count > len(shape) or not math.prod(shape):
        return [(key, (), shape)]
    places = itertools.product(*(range(size) for size in shape[:count]))
    return [(text.format(*place), place, shape[count:]) for place in places]


def _key(name: str) -> Key:
    if not name.startswith(_STATE):
        return PARAMETER, canonical(name)
    kind, _, rest = name.removeprefix(_STATE).partition(".")
    return KINDS.get(kind, kind), canonical(rest)


class _Loader:
    """Puts one tensor together from the chunks that touch it."""

    def __init__(self, chunks: list[Chunk], place: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self._chunks, self._place, self._shape = chunks, place, shape

    def __call__(self) -> torch.Tensor:
        count, whole = len(self._place), None
        for at, sizes, path, first, length in self._chunks:
            inside = zip(self._place, at, sizes, strict=False)
            if not all(start <= n < start + size for n, start, size in inside):
                continue
            with path.open("rb") as file:
                file.seek(first)
                part = load_tensor(io.BytesIO(file.read(length)), f"{path} at byte {first}")
            part = part.reshape(sizes)[tuple(n - start for n, start in zip(self._place, at, strict=False))]
            if whole is None:
                whole = part if tuple(part.shape) == self._shape else part.new_zeros(self._shape)
            if whole is not part:
                whole[tuple(slice(a, a + n) for a, n in zip(at[count:], sizes[count:], strict=True))] = part
        if whole is None:
            raise CheckpointError(f"no chunk holds the tensor of shape {self._shape} at {self._place}")
        return whole
