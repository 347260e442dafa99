"""Rows of collectives: operation, group, bytes, and the numbers before and after, worked out here for every rank."""

import json
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import all_reduce as reduced_by_another_name  # bound before anything is armed

from msprobe_megatron import attach
from msprobe_megatron.config import Overrides, from_document
from tests.support.forked import run_forked
from tests.unit.job.features.monitor.conftest import rows_of

RANKS = 2


def given(rank, size=4):
    """What a rank brings along."""
    return np.arange(size, dtype=np.float32) * 2.5 + 10 * rank - 1


class Talks(nn.Module):
    """A model that communicates in its forward, in the ways a training script does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, rank):
        import torch.distributed as dist

        x = torch.from_numpy(given(rank))
        reduced = x.clone()
        reduced_by_another_name(reduced)
        exchanged = torch.empty(4)
        dist.all_to_all_single(exchanged, x.clone())
        pair = [x.clone(), 3 * x]
        with dist._coalescing_manager(async_ops=True) as together:
            for one in pair:
                dist.all_reduce(one)
        together.wait()
        gathered = [torch.empty(4) for _ in range(RANKS)]
        dist.all_gather(gathered, x.clone())
        return (self.weight * (reduced + exchanged + pair[0] + gathered[1])).sum()


def train(out):
    torch.distributed.init_process_group("gloo")
    model = Talks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    document = {"monitor": {"comm": True, "activations": False, "gradients": False, "optimizer": False}}
    with attach(model, optimizer, from_document(document, "probe.yaml", Overrides(output=out)), step=0) as session:
        for _ in range(2):
            optimizer.zero_grad()
            model(int(os.environ["RANK"])).backward()
            optimizer.step()
    torch.distributed.destroy_process_group()
    return list(session.faults)


def test_values_groups_and_bytes(tmp_path):
    assert run_forked(RANKS, train, str(tmp_path / "out")) == [[]] * RANKS
    every = [given(rank) for rank in range(RANKS)]
    total = sum(every)
    for rank in range(RANKS):
        mine = every[rank]
        exchanged = np.concatenate([other.reshape(RANKS, -1)[rank] for other in every])
        expected = {
            "all_reduce": ([mine, mine, 3 * mine], [total, total, 3 * total]),
            "all_to_all_single": ([mine], [exchanged]),
            "all_gather": ([mine], every),
        }
        rows = [row for row in rows_of(tmp_path / "out", rank, 1) if row["kind"] == "comm"]
        for row in rows:
            row["extra"] = json.loads(row["extra"])
            assert (row["extra"]["group"], row["extra"]["ranks"]) == ("world", [0, 1])
            assert row["op"] == f"torch.distributed.{row['extra']['op']}"
        for op, sides in expected.items():
            for io, arrays in zip(("input", "output"), sides, strict=True):
                found = [row for row in rows if row["extra"]["op"] == op and row["io"] == io]
                values = [(array.min(), array.max(), array.sum(), array.size) for array in arrays]
                assert [(row["min"], row["max"], row["sum"], row["numel"]) for row in found] == values, (rank, op, io)
                squares = [float((array.astype(np.float64) ** 2).sum()) for array in arrays]
                assert [row["sumsq"] for row in found] == pytest.approx(squares)
        # The two that were put together are one call, of 2 x 4 numbers of 4 bytes.
        told = [row["extra"]["bytes"] for row in rows if row["io"] == "input"]
        assert told == [16, 16, 32, 32, 16]
        assert len(rows) == sum(len(side) for sides in expected.values() for side in sides)
