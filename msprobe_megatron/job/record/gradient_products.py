"""Rows of products that weight gradients must equal, one a weight: `products/rank_00000/steps_*.parquet`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from msprobe_megatron.job.record.update_samples import check_row
from msprobe_megatron.job.record.writer import ROW_BYTES, Batch, WriterCounts
from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.run_directory.table import build_table

ELEMENTS = 4
"""Elements of each gradient, spread over it."""


class Product(NamedTuple):
    """A weight or an expert layer, and how many of the numbers that are on their way belong to it."""

    name: str
    kind: str
    op: str
    dtype: str
    gradient_dtype: str
    calls: int
    skipped: bool
    """Something of it could not be multiplied: no law applies to it in this step."""
    held: list[bool]
    """Which elements of the reduced gradient this rank holds; empty where there is no gradient."""
    weighted: bool
    """Whether the elements of the weight follow those of the gradient."""
    shift: float


@dataclass(frozen=True)
class ProductBatch(Batch):
    """The products of one step: those of all calls, and elements of gradients and weights, on their way to the host."""

    step: int
    found: Sequence[Product]
    numbers: Any
    """Products of all calls, two rows of elements each, then elements of gradients and weights; None without any."""

    @property
    def nbytes(self) -> int:
        """A few rows."""
        return ROW_BYTES * (1 + len(self.found))

    def expected_bytes(self, last: int) -> int:
        """Too small to count."""
        return 0

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """One row a weight: products and their squares, summed over the calls in double precision."""
        numbers = np.empty(0) if self.numbers is None else self.numbers.wait().double().numpy()
        split = sum(found.calls for found in self.found) * 2 * ELEMENTS
        products, elements = numbers[:split].reshape(-1, 2, ELEMENTS), numbers[split:].tolist()
        rows, call, element = [], 0, 0
        for seq, found in enumerate(self.found):
            mine = products[call : call + found.calls]
            call += found.calls
            facts: dict[str, Any] = {
                "kind": found.kind,
                "calls": found.calls,
                "skipped": found.skipped,
                "products": mine[:, 0].sum(0).tolist() if found.calls else [0.0] * ELEMENTS,
                "absolute": np.abs(mine[:, 0]).sum(0).tolist() if found.calls else [0.0] * ELEMENTS,
                "squares": mine[:, 1].sum(0).tolist() if found.calls else [0.0] * ELEMENTS,
                "gradient_dtype": found.gradient_dtype,
                "shift": found.shift,
            }
            for name, there in (("gradient", bool(found.held)), ("weight", found.weighted)):
                if there:
                    numbers = elements[element : element + ELEMENTS]
                    element += ELEMENTS
                    held = found.held if name == "gradient" else [True] * ELEMENTS
                    facts[name] = [x if own else None for x, own in zip(numbers, held, strict=True)]
            rows.append(check_row(seq, found.name, "products", found.op, found.dtype, ELEMENTS, facts))
        table = build_table(self.step, rows, np.empty((0, 5)), np.empty((0, 4), np.int64), identity)
        path = f"products/rank_{identity['rank']:05d}/steps_{self.step:06d}_{self.step:06d}.parquet"
        return directory.write_table(path, table)

    def count(self, counts: WriterCounts) -> None:
        """Rows like others."""
        counts.rows_written += len(self.found)

    def drop(self, counts: WriterCounts) -> None:
        """Rows lost."""
        counts.rows_dropped += len(self.found)
