"""A guard against growing cost that does not depend on the machine: what can be counted is counted, not timed."""

import gc
import json
import re
import sys
from unittest import mock

import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.config import Overrides, from_document
from msprobe_megatron.job.features.dump.probe import DumpProbe
from msprobe_megatron.job.measure import native
from msprobe_megatron.lab.bench.profiles.profile import profiles
from msprobe_megatron.lab.bench.tables import counts
from msprobe_megatron.lab.bench.tables.counts import VARIANTS, Counting, hooks
from tests.unit.lab.bench.forks import bench, forked

LAYERS, WIDTH = 6, 16
# Modules that are called: six linears and the net. Each has an input, an output and a gradient of both; the net's input
# asks for no gradient, and neither does that of the first linear, which is the very same tensor.
ROWS_OF_MODULES = (LAYERS + 1) * 4 - 2
# Weight and bias of each linear, their gradients.
ROWS_OF_PARAMETERS = LAYERS * 2 * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def job(tmp_path):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []

    def step(look=False):
        optimizer.zero_grad()
        output = net(torch.ones(4, WIDTH))
        if look:
            seen.append(hooks(net))
        output.sum().backward()
        optimizer.step()

    def armed(document):
        return attach(net, optimizer, from_document(document, "test", Overrides(output=str(tmp_path / "run"))))

    return net, step, armed, seen


def operations(step, steps=4):
    with Counting() as counting:
        for _ in range(steps):
            step()
    return {name: count / steps for name, count in counting.counts.items()}


def test_rows_hooks_and_operations_of_a_recorded_step(job):
    net, step, armed, seen = job
    plain = operations(step)
    with armed({"dump": {"level": "L0"}}) as session:
        step(look=True)
        recorded = operations(step)
    counts = session.writer.counts
    assert counts.rows_written / counts.steps_written == ROWS_OF_MODULES + ROWS_OF_PARAMETERS
    # Two hooks a module while a step is recorded, none after it.
    assert seen == [2 * (LAYERS + 1)]
    assert hooks(net) == 0
    if native.kernel() is None:
        pytest.skip("no compiler here: the torch twin needs operations")
    added = {name: recorded.get(name, 0) - plain.get(name, 0) for name in {*recorded, *plain}}
    # The kernel reads tensors by their address; what is left is the slot table's, once a step and not once a tensor.
    assert sum(added.values()) <= 12
    assert added.get("empty", 0) + added.get("clone", 0) + added.get("_to_copy", 0) <= 2


def test_nothing_on_idle_steps(job):
    net, step, armed, seen = job
    plain = operations(step)
    with armed({"steps": [10**6], "dump": {"level": "mix"}}) as session:
        step(look=True)
        idle = operations(step)
    assert idle == plain
    assert seen == [0]
    assert session.writer.counts.steps_written == 0


def test_recorded_steps_leave_no_objects_behind(job):
    _, step, armed, _ = job
    with armed({"dump": {"level": "L0"}}) as session:
        blocks = []
        for _ in range(6):
            for _ in range(5):
                step()
            session.writer.flush()
            gc.collect()
            blocks.append(sys.getallocatedblocks())
    # Steps are kept as numbers in a list; anything else that stayed would be hundreds of blocks a step.
    assert (blocks[-1] - blocks[2]) / 15 < 20


def test_what_waits_and_what_is_allocated_is_seen():
    x = torch.arange(6.0)
    with Counting() as quiet:
        x + 1
    with Counting() as waiting:
        x.sum().item()
        x.nonzero()
        x.clone()
    assert (quiet.waits(), quiet.allocations(), sum(quiet.counts.values())) == (0, 0, 1)
    assert (waiting.waits(), waiting.allocations()) == (2, 1)


def test_the_command_counts_the_same_for_megatron(tmp_path):
    if native.kernel() is None:
        pytest.skip("no compiler here: the torch twin needs operations")
    code, text = bench("counts", "--json", "--out", str(tmp_path))
    assert code == 0
    lines = {line["name"]: line for line in json.loads(text)["results"]}
    assert set(lines) == set(VARIANTS)
    for name, line in lines.items():
        assert line["host_synchronisations"] <= (1 if name.startswith("dump") else 0)
        assert line["collectives"] == 0
        # One table of slots a step and no copies of tensors, whatever the number of rows.
        assert line["allocations"] <= 2
        assert line["operations"] <= 48
        if name.endswith("idle"):
            assert (line["rows"], line["hooks"], line["operations"], line["allocations"]) == (0, 0, 0, 0)
        else:
            assert line["rows"] > 300


def waiting(out):
    """A variant of the dump that reads a number back for every tensor, and one as it is."""
    see = DumpProbe.see

    def reading(self, place, tensor, *args):
        tensor.sum().item()
        return see(self, place, tensor, *args)

    line = {"name": "dump L0", "host_synchronisations": 99, "asked": {"host_synchronisations": 1}}
    well = profiles(counts, [line], out)
    with mock.patch.object(DumpProbe, "see", reading):
        return [*well, *profiles(counts, [line], out / "again")]


def test_who_waits_is_named(tmp_path):
    well, badly = forked(waiting, tmp_path)
    assert well.startswith("dump L0: waits and collectives of a step by who calls them: ")
    assert "reading" not in well
    assert re.search(r"reading → (_local_scalar_dense|item)` \d\d", badly), badly
