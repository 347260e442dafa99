"""Whole tensors of a run by name, as words: shards of all ranks put together where their places are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import duckdb
import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.analysis.load.saved_tensors import TensorFiles
from msprobe_megatron.topology.index_map import index_map
from msprobe_megatron.topology.shards import ShardSpec

Words = npt.NDArray[Any]
Key = tuple[str, str, str, str]
"""Kind, name, io, path."""
_AXES = ("tp", "pp", "dp", "cp", "ep", "etp")
_COLUMNS = (
    *("microbatch", "seq", "rank", *_AXES, "kind", "name", "io", "path", "op", "dtype", "shape", "shard", "numel"),
    *("min", "max", "sum", "sumsq", "absmax", "n_nan", "n_posinf", "n_neginf", "n_zero", "digest", "sketch"),
    *("tensor", "extra"),
)


class Whole(NamedTuple):
    """A whole tensor: its dtype as safetensors names it, its elements as words, and where it stood in the forward."""

    dtype: str
    words: Words
    seq: int

    def values(self) -> npt.NDArray[np.float64]:
        """The elements as numbers."""
        return numbers(self.dtype, self.words)


def numbers(dtype: str, words: Words) -> npt.NDArray[np.float64]:
    """Words of a dtype as float64."""
    if dtype == "BF16":
        found: npt.NDArray[np.float64] = (words.astype("<u4") << 16).view("<f4").astype(np.float64)
        return found
    return words.astype(np.float64)


@dataclass(frozen=True)
class StepTensors:
    """The rows of one step of a run, by kind, name, io and path; those of forward and weights, of one microbatch."""

    run: Run
    step: int
    rows: dict[Key, list[dict[str, Any]]]
    files: TensorFiles

    @classmethod
    def of(cls, run: Run, step: int, microbatch: int = 0) -> StepTensors:
        """Read the rows of a step."""
        connection = duckdb.connect()
        chosen = run.rows(connection, step).filter(
            f"phase in ('forward', 'optimizer') and kind in ('activation', 'parameter', 'token', 'data')"
            f" and (microbatch is null or microbatch = {int(microbatch)})"
        )
        found: dict[Key, list[dict[str, Any]]] = {}
        names = ", ".join(f'"{name}"' for name in _COLUMNS)
        for values in chosen.project(names).order("rank, seq").fetchall():
            row = dict(zip(_COLUMNS, values, strict=True))
            found.setdefault((row["kind"], row["name"], row["io"], row["path"]), []).append(row)
        return cls(run, step, found, TensorFiles(run))

    def __contains__(self, key: Key) -> bool:
        return key in self.rows

    def first(self, key: Key) -> dict[str, Any]:
        """The first row under a key."""
        return self.rows[key][0]

    def whole(self, key: Key) -> Whole | None:
        """The whole tensor; None if it was not saved or its shards have no known place."""
        rows = self.rows.get(key, [])
        if not rows or any(row["tensor"] is None for row in rows):
            return None
        first = rows[0]
        ranks = {row["rank"] for row in rows}
        spec = ShardSpec.parse(first["shard"])
        if len(ranks) == 1 or not any(self.run.sizes.get(axis, 1) > 1 for axis in spec.cut_axes()):
            return self._one(first) if len(ranks) == 1 or spec.unknown is None else None
        return self._together(rows)

    def _one(self, row: dict[str, Any]) -> Whole:
        view = self.files.view(self.step, row["rank"], row["tensor"], tuple(row["shape"]))
        return Whole(view.dtype, view.words, row["seq"])

    def _together(self, rows: list[dict[str, Any]]) -> Whole | None:
        sizes = self.run.sizes
        whole: Words | None = None
        shape: tuple[int, ...] = ()
        dtype = ""
        for row in rows:
            spec = ShardSpec.parse(row["shard"])
            local = tuple(row["shape"])
            found = None if spec.unknown is not None else spec.global_shape(local, lambda axis: sizes.get(axis, 1))
            held = index_map(spec, local, _coordinate(row), lambda axis: sizes.get(axis, 1))
            if found is None or held is None or spec.flat is not None:
                return None
            part = self._one(row)
            if whole is None:
                whole, shape, dtype = np.zeros(math.prod(found), part.words.dtype), found, part.dtype
            whole[_flat(held)] = part.words
        return None if whole is None else Whole(dtype, whole.reshape(shape), rows[0]["seq"])


def _coordinate(row: dict[str, Any]) -> Callable[[str], int]:
    return lambda axis: int(row.get(axis) or 0)


def _flat(numbering: Any) -> npt.NDArray[np.int64]:
    """Numbers in the whole tensor of the elements of a shard."""
    index: Any = np.zeros((), np.int64)
    for step, segments in numbering:
        along = np.concatenate([np.arange(count, dtype=np.int64) * step + offset for _, count, offset in segments])
        index = index[..., None] + along
    return np.asarray(index)
