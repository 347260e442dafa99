"""Rows of kind ``perturb``: the verdicts on the results that were examined in a few steps, in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from msprobe_megatron.job.record.writer import ROW_BYTES, Batch, WriterCounts
from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.run_directory.schema import COUNT_COLUMNS, FLOAT_COLUMNS, Row
from msprobe_megatron.run_directory.table import build_table


@dataclass(frozen=True)
class PerturbBatch(Batch):
    """`rows` waits for the device and gives the rows of each step, `number` of them; called in the writer thread."""

    step: int
    number: int
    rows: Callable[[], Mapping[int, Sequence[Row]]]

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that the batch holds while it waits."""
        return 2 * ROW_BYTES * (1 + self.number)

    def expected_bytes(self, last: int) -> int:
        """Expected to be as large as the last."""
        return last

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Write the rows of all steps to one file."""
        import pyarrow as pa

        rows = self.rows()
        nothing = np.empty((0, len(FLOAT_COLUMNS))), np.empty((0, len(COUNT_COLUMNS)), np.int64)
        tables = [build_table(step, some, *nothing, identity) for step, some in sorted(rows.items())]
        path = f"perturb/rank_{identity['rank']:05d}/steps_{min(rows):06d}_{max(rows):06d}.parquet"
        return directory.write_table(path, pa.concat_tables(tables))

    def count(self, counts: WriterCounts) -> None:
        """Its rows were written."""
        counts.rows_written += self.number

    def drop(self, counts: WriterCounts) -> None:
        """Its rows are lost."""
        counts.rows_dropped += self.number
