"""Collectives: a tensor is measured again after one wrote into it, and groups that are classes of Python still work."""

import math

import pytest
import torch
import torch.distributed as dist
from msprobe_megatron.patches import distributed
from torch import nn

from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.job.patching.patch_set import PatchSet
from msprobe_megatron.job.sites.comm.bus import CommBus
from tests.support.forked import run_forked


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


class Single(dist.ProcessGroup):
    """A group of Python, as wrappers for fault tolerance are, that does little itself."""

    def __init__(self):
        super().__init__(0, 1)

    def getBackendName(self):
        return "single"

    def alltoall_base(self, out, given, *rest):
        out.copy_(given)
        future = torch.futures.Future()
        future.set_result([out])
        return torch._C._distributed_c10d._create_work_from_future(future)


class Told:
    """Notes what a collective was."""

    def __init__(self):
        self.seen = []

    def begin(self, read, group, args):
        self.seen.append(read(group, args).op)

    def waited(self, work):
        pass


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("broadcast", "broadcast"),
        ("send", "send"),
        ("all_gather_single", "all_gather_into_tensor"),
        ("allgather_into_tensor_coalesced", "all_gather_into_tensor"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_tensor"),
    ],
)
def test_a_group_of_python_does_not_call_itself_for_ever(name, op):
    """What it has not overridden is C++'s again, which has no backend here and says so."""
    group, told, x, y = Single(), Told(), torch.zeros(2), torch.ones(2)
    arguments = {"broadcast": ([x], dist.BroadcastOptions()), "send": ([x], 0, 0), "all_gather_single": (x, y)}
    patches = PatchSet(distributed.PATCHES, told)
    patches.apply()
    try:
        with pytest.raises(RuntimeError, match="No backend type") as failure:
            getattr(group, name)(*arguments.get(name, ([x], [y])))
        assert not isinstance(failure.value, RecursionError)
        assert told.seen == [op], "once, however many methods of torch lead to it"
    finally:
        patches.revert()


def test_what_a_group_of_python_overrides_is_found():
    group, out = Single(), torch.zeros(2)
    patches = PatchSet(distributed.PATCHES, Told())
    patches.apply()
    try:
        group.all_to_all_single(out, torch.ones(2), [], []).wait()
    finally:
        patches.revert()
    assert out.tolist() == [1.0, 1.0]


class Finished(torch._C._distributed_c10d.Work):
    """A handle of Python."""

    def wait(self, timeout=None):
        return True


def overriding_group(inner=None):
    """A group of Python that does its collectives itself, or by another group, as wrappers for fault tolerance do."""

    class Doubling(dist.ProcessGroup):
        def __init__(self):
            super().__init__(0, 1)

        def getBackendName(self):
            return "doubling"

        def allreduce(self, tensors, options=None):
            if inner is not None:
                inner.allreduce(tensors, options)
            tensors[0].mul_(2)
            return Finished()

    return Doubling()


class Listening:
    """Notes beginnings and completions with the values of their tensors."""

    def __init__(self):
        self.seen = []

    def begins(self, exchange):
        self.seen.append(("begins", exchange.op, exchange.sources[0].tolist()))

    def completed(self, exchange, token):
        self.seen.append(("completed", exchange.op, exchange.targets[0].tolist()))

    def failed(self, error):
        raise error


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_collective_that_a_group_of_python_overrides_is_seen_once(wrapped):
    """Input before it, result after its handle has been waited for; that of the group below is a part of it."""
    group = overriding_group(overriding_group() if wrapped else None)
    bus, listener, x = CommBus(), Listening(), torch.ones(1)
    before = vars(type(group))["allreduce"], vars(Finished)["wait"]
    bus.join(listener)
    try:
        work = group.allreduce([x], dist.AllreduceOptions())
        result = 4.0 if wrapped else 2.0
        assert listener.seen == [("begins", "all_reduce", [1.0])]
        work.wait()
        assert listener.seen[1:] == [("completed", "all_reduce", [result])]
        names = {line["id"]: line["fired"] for line in bus.ledger() if line["state"] == "bound"}
        assert names["distributed.overriding_group.<locals>.Doubling.allreduce"] >= 1
    finally:
        bus.leave(listener)
    assert (vars(type(group))["allreduce"], vars(Finished)["wait"]) == before
    group.allreduce([x])
    assert len(listener.seen) == 2, "silent once nobody listens"


def test_a_class_that_is_defined_later_is_found_at_the_next_recorded_step():
    bus, listener = CommBus(), Listening()
    bus.join(listener)
    bus.leave(listener)
    group = overriding_group()
    bus.join(listener)
    try:
        group.allreduce([torch.ones(1)]).wait()
    finally:
        bus.leave(listener)
    assert [event for event, *_ in listener.seen] == ["begins", "completed"]
