"""Tokens at experts: which sample and position each row of an expert's tensors belongs to, in one run.

Tokens arrive in an order that depends on layout and dispatcher. What arrives is a copy, bit for bit, of a row of the
layer's input, whose places are known: so the rows of the expert's own input tell where they come from, and every other
tensor of that expert on that rank has the same order. Rows that several places have alike (the first token of many
samples) are left out: nothing says which is which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.pairs.assembly import covers, part_of, together
from msprobe_megatron.analysis.load.saved_tensors import TensorFiles
from msprobe_megatron.topology.shards import ShardSpec

Numbers = npt.NDArray[np.int64]
EXPERT = re.compile(r"^(.*)\.experts\.local_experts\.\d+")
SAMPLE = 1 << 32
"""The number of a token is its sample times this, plus its position."""

_UNCLEAR, _STRANGE = -1, -2
_KEPT = 4


class ExpertTokens:
    """Numbers of the tokens of one run's experts."""

    def __init__(self, saved: Mapping[tuple[Any, ...], list[Any]], files: TensorFiles, sizes: dict[str, int]) -> None:
        self._saved, self._files, self._sizes = saved, files, sizes
        self._places = lru_cache(_KEPT)(self._find_places)

    def numbers(self, step: int, name: str, rank: int, first: int) -> Numbers | None:
        """Number of the token of each row of an expert's tensors, -1 where it is not clear; None if nothing is known.

        `first` is the first sample of the microbatch, over all data-parallel ranks.
        """
        expert = EXPERT.match(name)
        if expert is None:
            return None
        rows = self._inputs(step, expert[0])
        row = next((row for row in rows if row.rank == rank and row.samples_from == first), None)
        places = self._places(step, expert[1], first)
        if row is None or places is None:
            return None
        words = np.ascontiguousarray(self._files.view(step, rank, row.tensor, row.shape).words)
        # Padding up to a capacity is zero; anything else that the layer was not given is no copy of its input.
        found = [places.get(token.tobytes(), _STRANGE if token.any() else _UNCLEAR) for token in words]
        return None if _STRANGE in found else np.array(found, np.int64)

    def _inputs(self, step: int, name: str) -> list[Any]:
        return self._saved.get((step, "forward", "activation", name, "input", "hidden_states"), [])

    def _find_places(self, step: int, layer: str, first: int) -> dict[bytes, int] | None:
        """Bytes of every row of the layer's input -> number of its token, -1 of rows that are there more than once."""
        found: dict[bytes, int] = {}
        rows = self._inputs(step, layer)
        if not rows or rows[0].whole is None or len(rows[0].whole) != 3:
            return None
        size = int(rows[0].whole[1])
        for start in range(first, first + size * self._sizes.get("dp", 1), size):
            whole = self._whole(step, [row for row in rows if row.samples_from == start])
            if whole is None:
                return None
            for position in range(whole.shape[0]):
                for sample in range(size):
                    token = whole[position, sample].tobytes()
                    found[token] = _UNCLEAR if token in found else (start + sample) * SAMPLE + position
        return found

    def _whole(self, step: int, rows: list[Any]) -> Any:
        """The input of the layer for one microbatch of one data-parallel rank, [s, b, h]."""
        parts = []
        for row in rows:
            spec = ShardSpec.parse(row.shard)
            if spec.unknown is not None or [dim.name for dim in spec.dims] != ["s", "b", "h"] or row.whole is None:
                return None
            view = self._files.view(step, row.rank, row.tensor, row.shape)
            part = part_of(view, spec, row.whole, row.place, self._sizes, None)
            if part is None:
                return None
            parts.append(part)
        if not parts or not covers(parts, parts[0].whole):
            return None
        return together(parts, parts[0].whole).reshape(parts[0].whole)
