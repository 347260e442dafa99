"""Rows of kind ``check``: findings of the comparison of ranks, in a small file beside those of the monitor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from msprobe_megatron.job.record.writer import ROW_BYTES, Batch, WriterCounts
from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.run_directory.safe_files import json_text
from msprobe_megatron.run_directory.schema import Row
from msprobe_megatron.run_directory.table import build_table


@dataclass(frozen=True)
class CheckBatch(Batch):
    """The findings of one check, as events."""

    step: int
    number: int
    found: tuple[dict[str, Any], ...]

    @property
    def nbytes(self) -> int:
        """A few rows."""
        return ROW_BYTES * (1 + len(self.found))

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Write one row per finding."""
        rows = [_row(seq, event) for seq, event in enumerate(self.found)]
        table = build_table(self.step, rows, np.empty((0, 5)), np.empty((0, 4), np.int64), identity)
        path = f"monitor/rank_{identity['rank']:05d}/checks_{self.step:06d}_{self.number:06d}.parquet"
        return directory.write_table(path, table)

    def count(self, counts: WriterCounts) -> None:
        """Add the rows."""
        counts.rows_written += len(self.found)

    def drop(self, counts: WriterCounts) -> None:
        """Add the lost rows."""
        counts.rows_dropped += len(self.found)


def _row(seq: int, event: Mapping[str, Any]) -> Row:
    name, kind, group, check = (str(event.get(key, "")) for key in ("name", "kind", "group", "check"))
    return Row(
        seq=seq,
        microbatch=None,
        phase="optimizer",
        vpp=None,
        kind="check",
        name=name,
        io=kind,
        path=group,
        op=check,
        site=-1,
        dtype="",
        shape=(),
        global_shape=None,
        shard="?a verdict, not a tensor",
        numel=0,
        slot=-1,
        extra=json_text(dict(event)),
    )
