"""Watching makes the host wait for nothing, adds no collective, and leaves nothing behind on steps it does not want."""

from collections import Counter

import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.config import Overrides, from_document
from msprobe_megatron.lab.bench.tables.counts import WAITING, Counting
from tests.unit.job.features.dump.test_synchronisation import Net, step
from tests.unit.job.measure.kernels import as_on_a_device

# Another look at the same memory is no launch.
VIEWS = {"detach", "view", "slice", "select", "as_strided", "alias", "split", "unbind", "_reshape_alias", "t"}
ALL = {
    **dict.fromkeys(
        ("activations", "gradients", "clipped", "microbatch_gradients", "optimizer", "master_weights"), True
    ),
    **dict.fromkeys(("update", "agreement", "parameters", "data"), True),
}


def armed(net, optimizer, tmp_path, monitor, **more):
    config = from_document({"monitor": monitor, **more}, "test", Overrides(output=str(tmp_path / "out")))
    return attach(net, optimizer, config, step=0)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
def test_no_synchronisation(tmp_path, monkeypatch, kernel):
    if not kernel:
        as_on_a_device(monkeypatch)
        monkeypatch.setattr("msprobe_megatron.job.measure.many.reads_together", lambda measurer: True)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, foreach=False)
    step(net, optimizer)
    with Counting() as plain:
        step(net, optimizer)
    session = armed(net, optimizer, tmp_path, ALL)
    with Counting() as watched:
        step(net, optimizer)
    session.close()
    assert session.faults == [] and session.writer.counts.rows_written > 100
    waits = {name: watched.counts[name] - plain.counts[name] for name in WAITING}
    assert not any(waits.values()), waits


def test_an_accelerator_is_given_few_operations(tmp_path, monkeypatch):
    """Gradients and moments of forty layers take as many as those of four."""
    monkeypatch.setattr("msprobe_megatron.job.measure.native.kernel", lambda: None)
    monkeypatch.setattr("msprobe_megatron.job.measure.many.reads_together", lambda measurer: True)

    def operations(layers):
        net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)])
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1, fused=True)
        session = armed(net, optimizer, tmp_path / str(layers), {"activations": False})
        for _ in range(2):
            step(net, optimizer)
        with Counting() as watched:
            step(net, optimizer)
        session.close()
        assert session.faults == [] and session.writer.counts.rows_written > 3 * 6 * layers
        with Counting() as plain:
            step(net, optimizer)
        more = watched.counts - plain.counts
        return {name: number for name, number in more.items() if name not in VIEWS}

    few, many = operations(4), operations(40)
    assert sum(many.values()) - sum(few.values()) < 20, (few, many)


def test_no_collective(tmp_path, monkeypatch):
    called: Counter[str] = Counter()
    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "all_to_all_single"):
        monkeypatch.setattr(torch.distributed, name, lambda *a, _name=name, **k: called.update([_name]))
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    session = armed(net, optimizer, tmp_path, ALL)
    step(net, optimizer)
    session.close()
    assert session.faults == [] and not called


def hooks_of(net):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()) + sum(
        len(p._backward_hooks or ()) for p in net.parameters()
    )


def test_hooks_stay_between_watched_steps_and_are_gone_otherwise(tmp_path):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    before = hooks_of(net), len(optimizer._optimizer_step_pre_hooks)
    session = armed(net, optimizer, tmp_path, {**ALL, "window": ["1-2", 5]})
    idle = hooks_of(net), len(optimizer._optimizer_step_pre_hooks)
    seen = []
    for _ in range(7):
        step(net, optimizer)
        seen.append((hooks_of(net), len(optimizer._optimizer_step_pre_hooks)))
    assert idle[0] == before[0]
    # Between 1 and 2 everything stays; after every other step there is nothing.
    assert seen[1][0] > idle[0] and [entry for i, entry in enumerate(seen) if i != 1] == [idle] * 6
    session.close()
    assert (hooks_of(net), len(optimizer._optimizer_step_pre_hooks)) == before
    assert session.ledger()["monitor"]["steps"] == 3


def test_rows_of_like_steps_are_one_object(tmp_path):
    """What a watcher is given: the same list of rows as long as steps are alike, and another when they are not."""
    from msprobe_megatron.job.record.monitor_files import StepRows

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = armed(net, optimizer, tmp_path, {"optimizer": False})
    seen: list[StepRows] = []

    class Watcher:
        def saw(self, rows):
            seen.append(rows)

    session.features.all[0]._job.watchers.append(Watcher())
    for _ in range(3):
        step(net, optimizer)
    optimizer.zero_grad()
    net(torch.ones(8, 16)).sum().backward()  # another batch size
    optimizer.step()
    session.close()
    assert [rows.step for rows in seen] == [0, 1, 2, 3]
    # The first step has no interval to the one before.
    assert seen[1].rows is seen[2].rows and seen[2].rows is not seen[3].rows
    for rows in seen:
        first = next(row for row in rows.rows if row.kind == "activation")
        assert rows.floats[first.slot, 3] == pytest.approx(16 * (8 if rows.step == 3 else 4))  # ones


class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_memory_does_not_grow_with_steps(tmp_path):
    """Everything that waits for a file is bounded: 72 bytes a row, and as many rows as a file has."""
    net = Big()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    session = armed(net, optimizer, tmp_path, {})
    probe = session.features.all[0]._probe
    sizes = []
    for _ in range(120):
        optimizer.zero_grad()
        net(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        session.features.all[0]._hand_over()  # short steps go to the writer together
        session.writer.flush()
        sizes.append(sum(f.floats.nbytes + f.counts.nbytes for steps in probe.file._runs for f in steps))
    session.close()
    assert max(sizes) < 1 << 20 and sizes[110] < sizes[90], "a full file is let go"
    assert len(list((tmp_path / "out/monitor/rank_00000").glob("*.parquet"))) == 2
