"""Recording makes the host wait for nothing: the operations that would read a device are counted."""

import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.config import Overrides, from_document
from msprobe_megatron.lab.bench.tables.counts import WAITING, Counting
from tests.unit.job.measure.kernels import as_on_a_device


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.ones(4, 16)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("dump", [{"level": "L0"}, {"level": "mix", "digest": True, "sketch": 8}], ids=str)
def test_at_most_one_synchronisation_a_step(tmp_path, monkeypatch, dump, kernel):
    if not kernel:
        as_on_a_device(monkeypatch)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Counting() as plain:
        step(net, optimizer)
    session = attach(
        net, optimizer, from_document({"dump": dump}, "test", Overrides(output=str(tmp_path / "r"))), step=0
    )
    with Counting() as recorded:
        step(net, optimizer)
    session.close()
    assert session.faults == [] and session.writer.counts.rows_written >= 50
    waits = {name: recorded.counts[name] - plain.counts[name] for name in WAITING}
    assert sum(waits.values()) <= 1, waits
