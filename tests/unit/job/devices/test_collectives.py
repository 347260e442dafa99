"""Collectives that gloo does not know by itself: NCCL's names and options, uneven sizes, sizes as tensors."""

import torch
import torch.distributed as dist

from tests.unit.job.devices.forked import run_forked

SIZES = (3, 0, 2)


def _part(rank, size):
    return torch.arange(size, dtype=torch.float32) + 10 * rank


def _uneven_all_gather():
    rank = dist.get_rank()
    parts = [torch.empty(size) for size in SIZES]
    work = dist.all_gather(parts, _part(rank, SIZES[rank]), async_op=True)
    work.wait()
    even = [torch.empty(1) for _ in SIZES]
    dist.all_gather(even, torch.tensor([float(rank)]))
    return [part.tolist() for part in parts] + [part.tolist() for part in even]


def _uneven_reduce_scatter():
    rank = dist.get_rank()
    output = torch.empty(SIZES[rank])
    inputs = [_part(owner, size) * (rank + 1) for owner, size in enumerate(SIZES)]
    dist.reduce_scatter(output, inputs)
    assert inputs[0].tolist() == (_part(0, SIZES[0]) * (rank + 1)).tolist()
    return output.tolist()


def _all_to_all_with_tensor_sizes():
    rank = dist.get_rank()
    sends = torch.tensor([rank, 1])
    receives = torch.tensor([0, 1]) if rank == 0 else torch.tensor([1, 1])
    output = torch.empty(int(receives.sum()))
    given = torch.arange(float(sends.sum())) + 10 * rank
    dist.all_to_all_single(output, given, receives, sends)
    return output.tolist()


def _groups():
    rank = dist.get_rank()
    pair = dist.new_group(range(2), backend="nccl", pg_options=object(), group_desc="pair")
    total = torch.tensor(float(rank + 1))
    if rank < 2:
        dist.all_reduce(total, group=pair)
    dist.barrier(device_ids=[0])
    return [dist.get_backend(), total.item(), dist.get_backend(pair) if rank < 2 else None]


def _send_and_give_back():
    """Megatron's `deallocate_pipeline_outputs`: the sender's memory goes while nobody has received yet."""
    size = 1 << 22  # more than sockets buffer
    if dist.get_rank() == 0:
        tensor = torch.ones(size)
        work = dist.isend(tensor, 1)
        tensor.data = torch.empty(1)
        others = [torch.full((size,), 7.0) for _ in range(4)]
        dist.barrier()
        work.wait()
        return [float(other[0]) for other in others]
    dist.barrier()
    received = torch.zeros(size)
    dist.recv(received, 0)
    return [float(received.min()), float(received.max())]


def test_memory_given_back_under_a_send_is_kept():
    assert run_forked(2, _send_and_give_back)[1] == [1.0, 1.0]


def test_uneven_all_gather():
    expected = [[0.0, 1.0, 2.0], [], [20.0, 21.0], [0.0], [1.0], [2.0]]
    assert run_forked(3, _uneven_all_gather) == [expected] * 3


def test_uneven_reduce_scatter():
    # Rank r gives (r + 1) times the part: 1 + 2 + 3 = 6 times in all.
    assert run_forked(3, _uneven_reduce_scatter) == [[0.0, 6.0, 12.0], [], [120.0, 126.0]]


def test_all_to_all_takes_sizes_as_tensors():
    # Rank 0 sends nothing to itself and one to rank 1; rank 1 sends one to each.
    assert run_forked(2, _all_to_all_with_tensor_sizes) == [[10.0], [0.0, 11.0]]


def test_nccl_becomes_gloo():
    assert run_forked(3, _groups) == [["gloo", 3.0, "gloo"], ["gloo", 3.0, "gloo"], ["gloo", 3.0, None]]
