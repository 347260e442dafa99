"""Inputs of modules as a run has recorded them: whole tensors of the requested samples.

For `replay`: the layout of the run that recorded them and of the job that is fed need not be the same.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.merge import labelled_query, micro_batch_size
from msprobe_megatron.analysis.compare.pairs.assembly import covers, part_of, together
from msprobe_megatron.analysis.compare.pairs.elements import View, widened
from msprobe_megatron.analysis.compare.pairs.tensor_pairs import Saved, read_saved
from msprobe_megatron.analysis.load.run import Run, RunError
from msprobe_megatron.analysis.load.saved_tensors import TensorFiles
from msprobe_megatron.topology.shards import ShardSpec

_KEPT = 8


class RecordedInputs:
    """The inputs of one step."""

    def __init__(self, run: Run, step: int) -> None:
        connection = duckdb.connect()
        self._run, self._step = run, step
        self._files = TensorFiles(run)
        self._size = micro_batch_size(run, run.rows(connection, step))
        found = read_saved(connection, labelled_query(connection, run, step, "replayed"))
        self._saved: dict[tuple[str, str], list[Saved]] = {
            (name, path): rows
            for (_, phase, kind, name, io, path), rows in found.items()
            if (phase, kind, io) == ("forward", "activation", "input")
        }
        self._together = lru_cache(_KEPT)(self._put_together)

    def names(self) -> set[str]:
        """Modules of which inputs were saved."""
        return {name for name, _ in self._saved}

    def has(self, name: str, path: str) -> bool:
        """True if this input of a module was saved."""
        return (name, path) in self._saved

    def whole(self, name: str, path: str, first: int, samples: int) -> tuple[tuple[str, ...], npt.NDArray[Any]]:
        """Names of the dimensions and values of the samples from `first` on; raises `RunError` if they are missing."""
        dims, values = self._together(name, path, first // self._size * self._size)
        if "b" not in dims:
            return dims, values
        at, begin = dims.index("b"), first // self._size * self._size
        parts = [values]
        while begin + self._size * len(parts) < first + samples:
            parts.append(self._together(name, path, begin + self._size * len(parts))[1])
        values = np.concatenate(parts, axis=at) if len(parts) > 1 else values
        wanted = slice(first - begin, first - begin + samples)
        return dims, values[tuple(wanted if i == at else slice(None) for i in range(values.ndim))]

    def _put_together(self, name: str, path: str, samples_from: int) -> tuple[tuple[str, ...], npt.NDArray[Any]]:
        rows = self._saved.get((name, path), [])
        label = f"{self._run.path}: step {self._step}: input {path} of {name}"
        spec = ShardSpec.parse(rows[0].shard) if rows else None
        if spec is None:
            raise RunError(f"{label}: was not saved")
        dims = tuple(dim.name for dim in spec.dims)
        chosen = [row for row in rows if row.samples_from == samples_from] if "b" in dims else rows[:1]
        if "b" not in dims:
            chosen = [row for row in rows if row.samples_from == rows[0].samples_from]
        if not chosen:
            raise RunError(f"{label}: samples from {samples_from} on were not saved")
        whole = chosen[0].whole
        if whole is None or spec.unknown is not None:
            raise RunError(f"{label}: cannot be put together: {spec.unknown or 'it has no fixed place'}")
        parts = []
        for row in chosen:
            view = self._files.view(self._step, row.rank, row.tensor, row.shape)
            part = part_of(view, ShardSpec.parse(row.shard), whole, row.place, self._run.sizes, None)
            if part is None or part.flat:
                raise RunError(f"{label}: cannot be put together: {row.shard}")
            parts.append(part)
        if not covers(parts, whole):
            raise RunError(f"{label}: some of its parts were not saved")
        elements = together(parts, whole)
        dtype = parts[0].view.dtype
        if np.issubdtype(elements.dtype, np.floating) or dtype in ("BF16", "F8_E4M3", "F8_E5M2"):
            elements = widened(View(dtype, elements))
        return dims, elements.reshape(whole) if math.prod(whole) == elements.size else elements
