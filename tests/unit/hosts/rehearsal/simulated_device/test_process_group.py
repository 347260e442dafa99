"""Collectives of the simulated device: gloo's numbers, poison until they are waited for."""


def _collectives():
    import torch
    import torch.distributed as dist

    dist.init_process_group("hccl")
    rank = dist.get_rank()
    own = torch.full((4,), float(rank + 1), device="npu")
    summed, mean, top = own.clone(), own.clone(), own.clone()
    dist.all_reduce(summed)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.all_reduce(top, dist.ReduceOp.MAX)
    gathered = torch.empty(8, device="npu")
    dist.all_gather_into_tensor(gathered, own)
    parts = [torch.empty(n + 1, device="npu") for n in range(2)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank), device="npu"))
    scattered = torch.empty(2, device="npu")
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device="npu"))
    exchanged = torch.empty(3, device="npu")
    sizes = [[1, 2], [2, 1]]  # rank 0 receives 1 of its own and 2 from rank 1
    dist.all_to_all_single(exchanged, torch.full((3,), float(rank), device="npu"), sizes[rank], sizes[rank])
    passed = torch.full((2,), float(rank), device="npu")
    received = torch.empty(2, device="npu")
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, passed, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    ):
        work.wait()
    sent = torch.full((2,), float(rank), device="npu")
    dist.broadcast(sent, 1)
    found = [summed, mean, top, gathered, *parts, scattered, exchanged, received, sent]
    answer = [t.cpu().tolist() for t in found]
    dist.destroy_process_group()
    return answer


def test_every_collective(device):
    first, second = device.run(_collectives, world=2)
    both = [[3.0] * 4, [1.5] * 4, [2.0] * 4, [1.0] * 4 + [2.0] * 4, [0.0], [1.0, 1.0]]
    assert first == [*both, [0.0, 2.0], [0.0, 1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    assert second == [*both, [4.0, 6.0], [0.0, 0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


def _asynchronous(fault):
    import torch
    import torch.distributed as dist

    from msprobe_megatron.hosts.rehearsal import simulated_device

    dist.init_process_group("hccl")
    buffer = torch.ones(8, device="npu")
    with simulated_device.Trace() as trace:
        work = dist.all_reduce(buffer[:4], async_op=True)
        beside = (buffer[4:] + 1).cpu().tolist()
        early = (buffer[:4] + 0).cpu().tolist() if fault == "early read" else None
        if fault == "early write":
            buffer[:4].add_(1)
        with simulated_device.planted(skip_work_wait=int(fault == "missing wait")):
            work.wait()
        late = (buffer[:4] + 0).cpu().tolist()
        torch.npu.synchronize()
        settled = buffer.cpu().tolist()
    dist.destroy_process_group()
    return {"beside": beside, "early": early, "late": late, "settled": settled, "races": trace.counts["races"]}


def test_a_result_is_there_after_the_wait(device):
    [found, _] = device.run(_asynchronous, "none", world=2)
    assert found == {
        "beside": [2.0] * 4,
        "early": None,
        "late": [2.0] * 4,
        "settled": [2.0] * 4 + [1.0] * 4,
        "races": 0,
    }


def test_an_early_read_and_a_missing_wait_read_poison(device):
    [early, _] = device.run(_asynchronous, "early read", world=2)
    assert all(value != value for value in early["early"])
    assert early["races"] == 1
    assert early["late"] == [2.0] * 4
    [missing, _] = device.run(_asynchronous, "missing wait", world=2)
    assert all(value != value for value in missing["late"])
    assert missing["races"] == 1
    assert missing["settled"][:4] == [2.0] * 4


def test_a_write_under_a_running_collective_is_a_race(device):
    [found, _] = device.run(_asynchronous, "early write", world=2)
    assert found["races"] >= 1
