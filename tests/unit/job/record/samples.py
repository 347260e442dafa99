"""Rows and batches to write in tests."""

from typing import Any

import torch

from msprobe_megatron.job.record.slots import SealedSlots, SlotTable
from msprobe_megatron.job.record.step_files import StepBatch
from msprobe_megatron.run_directory.schema import Row

IDENTITY = {"rank": 3, "tp": 1, "pp": 2, "dp": 4, "cp": 5, "ep": 6, "etp": 7}


def row(seq: int = 0, slot: int = -1, **changes: Any) -> Row:
    plain = Row(
        seq=seq,
        microbatch=0,
        phase="forward",
        vpp=0,
        kind="activation",
        name="decoder.layers.0.mlp",
        io="input",
        path="0",
        op="MLP",
        site=2,
        dtype="float32",
        shape=(4, 8),
        global_shape=(8, 8),
        shard="h[tp]",
        numel=32,
        slot=slot,
    )
    return plain._replace(**changes)


def sealed(*figures: tuple[list[float], list[int]]) -> SealedSlots:
    table = SlotTable(torch.device("cpu"))
    for floats, counts in figures:
        slot = table.take()
        table.floats(slot).copy_(torch.tensor(floats, dtype=torch.float64))
        table.counts(slot).copy_(torch.tensor(counts))
    return table.seal()


def batch(step: int = 10, rows: int = 5, complete: bool = True) -> StepBatch:
    figures = [([float(k)] * 5, [k] * 4) for k in range(rows)]
    return StepBatch(step, [row(k, k) for k in range(rows)], sealed(*figures), {"0": "train.py:1"}, complete)
