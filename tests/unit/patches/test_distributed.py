"""A collective writes into a tensor and leaves its version counter alone: it has to be measured again after it."""

import math

import torch
import torch.distributed as dist
from torch import nn

from msprobe_megatron.analyse.load import open_run
from tests.forked import run_forked


class Between(nn.Module):
    """Two modules, and an all-reduce in place between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        dist.all_reduce(y.data)
        return self.second(y)


def train(config, out):
    from msprobe_megatron import attach
    from msprobe_megatron.config import Overrides, load

    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = Between()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, load(config, Overrides(output=out))):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    return {}


def test_a_tensor_is_measured_anew_after_a_collective_wrote_into_it(tmp_path):
    (tmp_path / "probe.yaml").write_text("dump: {level: L0}\n")
    run_forked(2, train, str(tmp_path / "probe.yaml"), str(tmp_path / "out"))
    rows = open_run(tmp_path / "out").rows().filter("kind = 'activation' and rank = 0")
    sums = {(name, io): total for name, io, total in rows.project("name, io, sum").fetchall()}
    before, after = sums["first", "output"], sums["second", "input"]
    # Both ranks hold the same numbers, so their sum is twice them.
    assert before != 0
    assert math.isclose(after, 2 * before, rel_tol=1e-6)
