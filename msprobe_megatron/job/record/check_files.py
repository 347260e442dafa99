"""Rows of kind ``check``: what the comparison of ranks found, as a small file of the monitor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from msprobe_megatron.record.batches import ROW_BYTES, WriterCounts
from msprobe_megatron.record.directory import RunDirectory
from msprobe_megatron.record.json_text import json_text
from msprobe_megatron.record.schema import Row
from msprobe_megatron.record.table import build_table


@dataclass(frozen=True)
class CheckBatch:
    """What was found at one check, as events.

    Example::

        writer.submit(CheckBatch(12, 3, ({"name": "decoder.final_layernorm.weight", …},)))
    """

    step: int
    number: int
    found: tuple[dict[str, Any], ...]

    @property
    def nbytes(self) -> int:
        """A few rows."""
        return ROW_BYTES * (1 + len(self.found))

    def coming(self, last: int) -> int:
        """Too small to count."""
        return 0

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """One row a finding."""
        rows = [_row(seq, event) for seq, event in enumerate(self.found)]
        table = build_table(self.step, rows, np.empty((0, 5)), np.empty((0, 4), np.int64), identity)
        path = f"monitor/rank_{identity['rank']:05d}/checks_{self.step:06d}_{self.number:06d}.parquet"
        return directory.write_table(path, table)

    def count(self, counts: WriterCounts) -> None:
        """Rows like others."""
        counts.rows_written += len(self.found)

    def drop(self, counts: WriterCounts) -> None:
        """Rows lost."""
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
