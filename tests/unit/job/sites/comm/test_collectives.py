"""Every way to communicate, in two real ranks: what went in, what came out once it was complete, and what stays."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce, batch_isend_irecv

from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.sites.comm.bus import COMM_BUS
from msprobe_megatron.job.sites.comm.collectives import CommSite, MemoryWatch
from msprobe_megatron.topology.coordinates import Coordinates
from tests.support.forked import run_forked

_KEPT = ("all_reduce", "isend", "irecv", "send", "all_gather_into_tensor", "batch_isend_irecv", "P2POp")
_EARLY = {"base": dist._all_gather_base}  # bound at import, under another name, as Megatron does


class Seen:
    """A sink that keeps what it is told, in order."""

    def __init__(self):
        self.rows = []

    def wants(self, name):
        return "barrier" not in name

    def wants_io(self, direction, io):
        return True

    def see(self, place, tensor, microbatch, phase):
        assert place.kind == "comm"
        self.rows.append((place.name, place.io, place.path, tensor.flatten().tolist(), json.loads(place.extra)))


def faulty(error, where):
    raise AssertionError(where) from error


def work():
    dist.init_process_group("gloo")
    me = dist.get_rank()
    sink, clock = Seen(), Clock()
    clock.start_step(0)
    changed = []
    watch = MemoryWatch(lambda: changed.append(1))
    site = CommSite(sink, clock, Coordinates(rank=me, world=2), faulty)
    before = {name: getattr(dist, name) for name in _KEPT}
    methods = dict(vars(dist.ProcessGroup)), dist.Work.wait
    watch.install()
    site.install()
    answers, late = _communicate(me, {name: getattr(dist, name) is before[name] for name in _KEPT}, sink)
    site.remove()
    watch.remove()
    late.wait()
    dist.all_reduce(torch.ones(1))
    answers["restored"] = (dict(vars(dist.ProcessGroup)), dist.Work.wait) == methods
    answers["changed"], answers["never_waited"] = len(changed), site.never_waited
    answers["rows"] = sink.rows
    dist.destroy_process_group()
    return answers


def _communicate(me, same, sink):
    answers = {"same": all(same.values())}
    x = torch.tensor([1.0, 2.0]) + me
    answers["sync"] = all_reduce(x)  # imported by name
    handle = dist.all_reduce(torch.tensor([float(me)]), op=dist.ReduceOp.MAX, async_op=True)
    answers["rows before wait"] = [row[:2] for row in sink.rows]
    answers["wait"] = handle.wait()
    answers["rows after wait"] = [row[:2] for row in sink.rows]
    _EARLY["base"](torch.empty(4), torch.tensor([1.0, me]))
    dist.all_gather([torch.empty(1), torch.empty(1)], torch.tensor([5.0 + me]))
    dist.reduce_scatter_tensor(torch.empty(1), torch.tensor([1.0, 10.0]) * (me + 1))
    dist.all_to_all_single(torch.empty(2), torch.tensor([me * 10.0, me * 10.0 + 1]))
    dist.broadcast(torch.tensor([7.0 + me]), src=1)
    dist.reduce(torch.tensor([1.0 + me]), dst=0)
    other = 1 - me
    if me == 0:
        dist.send(torch.tensor([3.5]), other)
    else:
        dist.recv(torch.empty(1), other)
    came = torch.empty(2)
    operations = [
        dist.P2POp(dist.isend, torch.tensor([me, 9.0]), other),
        dist.P2POp(dist.irecv, came, other),
    ]
    answers["batch"] = [handle.wait() for handle in batch_isend_irecv(operations)]
    answers["came"] = came.tolist()
    with dist._coalescing_manager(async_ops=True) as together:
        for value in (1.0, 2.0):
            dist.all_reduce(torch.tensor([value]))
    together.wait()
    never = dist.irecv(torch.empty(1), other, tag=5)
    dist.isend(torch.tensor([1.0]), other, tag=5).wait()
    return answers, never


@pytest.fixture(scope="module")
def ranks():
    return run_forked(2, work)


def rows_of(ranks, rank, op):
    return [row for row in ranks[rank]["rows"] if row[4]["op"] == op]


def test_functions_keep_their_identity_and_handles_their_answers(ranks):
    for rank in ranks:
        assert rank["same"] and rank["restored"]
        assert rank["sync"] is None and rank["wait"] is True and rank["batch"] == [True, True]
        assert rank["changed"] > 20  # twice for each exchange


def test_a_result_is_told_when_it_has_been_waited_for(ranks):
    name = "comm/world/torch.distributed.all_reduce."
    for rank in ranks:
        told = [(f"{name}0", "input"), (f"{name}0", "output"), (f"{name}1", "input")]
        assert rank["rows before wait"] == told
        assert rank["rows after wait"] == [*told, (f"{name}1", "output")]


def test_all_reduce_in_every_form(ranks):
    for rank in (0, 1):
        rows = rows_of(ranks, rank, "all_reduce")
        values = [(io, data) for _, io, _, data, _ in rows]
        own = (np.array([1.0, 2.0]) + rank).tolist()
        total = (np.array([1.0, 2.0]) + np.array([2.0, 3.0])).tolist()
        assert values[:4] == [("input", own), ("output", total), ("input", [float(rank)]), ("output", [1.0])]
        # coalesced: one call with both tensors
        assert [data for _, data in values[4:]] == [[1.0], [2.0], [2.0], [4.0]]
        assert [row[2] for row in rows[4:]] == ["0", "1", "0", "1"]
        facts = [row[4] for row in rows]
        assert [fact["async"] for fact in facts] == [False, False, True, True, True, True, True, True]
        assert facts[0]["reduction"] == "SUM" and facts[2]["reduction"] == "MAX"
        assert facts[0] == facts[0] | {"group": "world", "ranks": [0, 1], "bytes": 8}


@pytest.mark.parametrize(
    ("op", "given", "got"),
    [
        ("all_gather_into_tensor", lambda me: [[1.0, me]], lambda me: [[1.0, 0.0, 1.0, 1.0]]),
        ("all_gather", lambda me: [[5.0 + me]], lambda me: [[5.0], [6.0]]),
        ("reduce_scatter_tensor", lambda me: [[1.0 + me, 10.0 * (me + 1)]], lambda me: [[[3.0], [30.0]][me]]),
        ("all_to_all_single", lambda me: [[me * 10.0, me * 10.0 + 1]], lambda me: [[0.0 + me, 10.0 + me]]),
        ("broadcast", lambda me: [[8.0]] if me == 1 else [], lambda me: [[8.0]]),
        ("reduce", lambda me: [[1.0 + me]], lambda me: [[3.0]] if me == 0 else []),
    ],
)
def test_collectives(ranks, op, given, got):
    for me in (0, 1):
        rows = rows_of(ranks, me, op)
        assert [row[3] for row in rows if row[1] == "input"] == given(me)
        assert [row[3] for row in rows if row[1] == "output"] == got(me)


def test_point_to_point(ranks):
    for me in (0, 1):
        sent, received = rows_of(ranks, me, "send"), rows_of(ranks, me, "recv")
        assert all(row[1] == "input" and row[4]["peer"] == 1 - me for row in sent)
        assert all(row[1] == "output" and row[4]["peer"] == 1 - me for row in received)
        assert [row[3] for row in sent] == ([[3.5]] if me == 0 else []) + [[me, 9.0], [1.0]]
        assert [row[3] for row in received] == ([[3.5]] if me == 1 else []) + [[1.0 - me, 9.0]]
        assert ranks[me]["came"] == [1.0 - me, 9.0]
    assert rows_of(ranks, 0, "send")[0][4]["async"] is False and rows_of(ranks, 0, "send")[1][4]["async"] is True


def test_what_nobody_waits_for_is_counted(ranks):
    assert [rank["never_waited"] for rank in ranks] == [1, 1]


def test_arguments_that_cannot_be_read_are_a_fault_of_the_kit_and_not_of_the_call():
    faults = []
    site = CommSite(Seen(), Clock(), Coordinates(), lambda error, where: faults.append((str(error), where)))
    site.install()

    def read(group, args):
        raise TypeError("new arguments")

    assert COMM_BUS.begin(read, None, ()) is None
    site.remove()
    assert faults == [("new arguments", "arguments of a collective")]
