"""Rows of sampled elements around an optimizer's step, one a parameter: `laws/rank_00000/steps_*.parquet`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from msprobe_megatron.job.record.writer import ROW_BYTES, Batch, WriterCounts
from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.run_directory.safe_files import json_text
from msprobe_megatron.run_directory.schema import Row
from msprobe_megatron.run_directory.table import build_table

if TYPE_CHECKING:
    import torch

    from msprobe_megatron.job.devices.base import HostCopy


class Sampled(NamedTuple):
    """A parameter whose elements were sampled, and what its optimizer says of it."""

    name: str
    optimizer: str
    op: str
    dims: int
    dtype: str
    main_dtype: str
    numel: int
    settings: dict[str, Any]


class Part(NamedTuple):
    """Some numbers of a copy on its way to the host."""

    copy: HostCopy
    start: int
    stop: int

    def wait(self) -> torch.Tensor:
        """Block until the copy has arrived and return them."""
        return self.copy.wait()[self.start : self.stop]


@dataclass(frozen=True)
class UpdateBatch(Batch):
    """The samples of one step; ``copies`` are on their way to the host: lengths and numbers, by what they are."""

    step: int
    found: Sequence[Sampled]
    copies: Mapping[str, tuple[list[int], Part]]
    success: bool
    norm: float | None

    @property
    def nbytes(self) -> int:
        """A few rows."""
        return ROW_BYTES * (1 + len(self.found))

    def expected_bytes(self, last: int) -> int:
        """Too small to count."""
        return 0

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """One row a parameter."""
        values: list[dict[str, list[float]]] = [{} for _ in self.found]
        for name, (lengths, copy) in self.copies.items():
            what, _, optimizer = name.partition(" ")
            mine = [i for i, entry in enumerate(self.found) if not optimizer or entry.optimizer == optimizer]
            numbers, at = copy.wait().tolist(), 0
            for index, length in zip(mine, lengths, strict=True):
                if length:
                    values[index][what] = numbers[at : at + length]
                at += length
        rows = [self._row(seq, entry, values[seq]) for seq, entry in enumerate(self.found)]
        table = build_table(self.step, rows, np.empty((0, 5)), np.empty((0, 4), np.int64), identity)
        path = f"laws/rank_{identity['rank']:05d}/steps_{self.step:06d}_{self.step:06d}.parquet"
        return directory.write_table(path, table)

    def _row(self, seq: int, entry: Sampled, values: dict[str, list[float]]) -> Row:
        facts = {"dims": entry.dims, "main_dtype": entry.main_dtype, "success": self.success, "norm": self.norm}
        facts |= {"settings": entry.settings, "values": values}
        return check_row(seq, entry.name, "update", entry.op, entry.dtype, entry.numel, facts)

    def count(self, counts: WriterCounts) -> None:
        """Rows like others."""
        counts.rows_written += len(self.found)

    def drop(self, counts: WriterCounts) -> None:
        """Rows lost."""
        counts.rows_dropped += len(self.found)


def check_row(seq: int, name: str, io: str, op: str, dtype: str, numel: int, facts: dict[str, Any]) -> Row:
    """A row of sampled numbers, which stand in ``facts``: no statistics, and nothing to merge over ranks."""
    return Row(
        seq=seq,
        microbatch=None,
        phase="optimizer",
        vpp=None,
        kind="check",
        name=name,
        io=io,
        path="",
        op=op,
        site=-1,
        dtype=dtype,
        shape=(),
        global_shape=None,
        shard="?sampled elements",
        numel=numel,
        slot=-1,
        extra=json_text(facts),
    )
