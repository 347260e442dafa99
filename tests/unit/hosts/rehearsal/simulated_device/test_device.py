"""What the simulated device promises: unreadable memory, counted launches and waits, poison, planted faults, gaps."""

import pytest

from tests.support.device import DeviceFailed


def _device():
    from msprobe_megatron.hosts.rehearsal import simulated_device

    return simulated_device


def _numbers():
    import torch

    x = torch.arange(12.0).view(3, 4)
    y = x.npu()
    pairs = [
        (x @ x.t(), y @ y.t()),
        (x.softmax(-1), y.softmax(-1)),
        (x[:, ::2].contiguous(), y[:, ::2].contiguous()),
        (x.sum(0), y.sum(0)),
        (x.bfloat16() * 3, y.bfloat16() * 3),
    ]
    linear = torch.nn.Linear(4, 2)
    twin = torch.nn.Linear(4, 2)
    twin.load_state_dict(linear.state_dict())
    twin.npu()
    linear(x).square().sum().backward()
    twin(y).square().sum().backward()
    pairs.append((linear.weight.grad, twin.weight.grad))
    z = torch.zeros(3, device="npu")
    torch.add(torch.ones(5, device="npu"), 1, out=z.resize_(0))
    pairs.append((torch.full((5,), 2.0), z))
    return [bool(torch.equal(a, b.cpu())) and b.device.type == "npu" for a, b in pairs]


def test_operators_give_the_numbers_of_the_host(device):
    assert device.run(_numbers)[0] == [True] * 7


def _host_read():
    import ctypes

    import torch

    x = torch.ones(4, device="npu")
    return ctypes.c_float.from_address(x.data_ptr()).value


def test_a_host_read_of_device_memory_ends_the_process_with_a_reason(device):
    with pytest.raises(DeviceFailed, match="the host read or wrote device memory directly"):
        device.run(_host_read)


def _counted():
    import torch

    x = torch.ones(4, device="npu")
    with _device().Trace(launches=True) as trace:
        y = x + x
        y.view(2, 2).t()
        y.mul_(2)
        float(y.sum())
        y.cpu()
        torch.npu.synchronize()
    waits = [(entry.what, entry.frames[0].function) for entry in trace.waits]
    return trace.counts, waits, [entry.what.partition(".")[0] for entry in trace.entries if entry.kind == "launch"]


def test_launches_and_waits_are_counted_with_their_stack(device):
    [(counts, waits, launches)] = device.run(_counted)
    assert launches == ["aten::add", "aten::mul", "aten::sum", "copy:d2h"], "views are none"
    assert counts["launches"] == 4
    assert counts["host_copies"] == 1
    assert [what for what, _ in waits] == ["item", "copy:d2h blocking", "device.synchronize"]
    assert waits[0][1] == "_counted"


def _side_stream(wait):
    import torch

    side = torch.npu.Stream()
    x = torch.ones(4, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.mul_(2)
    if wait:
        torch.npu.current_stream().wait_stream(side)
    with _device().Trace() as trace:
        early = (x + 1).cpu()
    torch.npu.current_stream().wait_stream(side)
    return early.tolist(), trace.counts["races"], (x + 1).cpu().tolist()


def test_what_another_stream_wrote_is_poison_until_it_is_waited_for(device):
    [(early, races, late)] = device.run(_side_stream, False)
    assert all(value != value for value in early)
    assert races == 1
    assert late == [3.0] * 4, "a reader that came too early must not spoil the value for the others"
    assert device.run(_side_stream, True)[0] == ([3.0] * 4, 0, [3.0] * 4)


def _pinned_copy(wait):
    import torch

    source = torch.ones(4, device="npu")
    target = torch.zeros(4, pin_memory=True)
    target.copy_(source, non_blocking=True)
    event = torch.npu.Event()
    event.record()
    if wait == "planted":
        with _device().planted(skip_event_synchronize=1):
            event.synchronize()
    elif wait:
        event.synchronize()
    return target.tolist()


def test_a_copy_to_the_host_is_poison_until_it_is_waited_for(device):
    assert device.run(_pinned_copy, True)[0] == [1.0] * 4
    for wait in (False, "planted"):
        [values] = device.run(_pinned_copy, wait)
        assert all(value != value for value in values)


def _late_copy():
    import time

    import torch

    with _device().planted(copy_microseconds=50_000):
        target = torch.zeros(4, pin_memory=True)
        target.copy_(torch.ones(4, device="npu"), non_blocking=True)
        event = torch.npu.Event()
        event.record()
        ready = event.query()
        started = time.perf_counter()
        event.synchronize()
        return ready, time.perf_counter() - started, event.query(), target.tolist()


def test_a_late_copy_keeps_the_host_waiting(device):
    [(ready, waited, then, values)] = device.run(_late_copy)
    assert not ready
    assert then
    assert waited > 0.03
    assert values == [1.0] * 4


def _overwritten_source(early):
    import torch

    source = torch.ones(4).pin_memory()
    with _device().Trace() as trace:
        target = torch.empty(4, device="npu")
        target.copy_(source, non_blocking=True)
        if early:
            source.zero_()
        torch.npu.synchronize()
        source.zero_()
    return trace.counts["races"]


def test_a_pinned_source_that_the_host_overwrites_under_a_copy_is_a_race(device):
    assert device.run(_overwritten_source, True)[0] == 1
    assert device.run(_overwritten_source, False)[0] == 0


def _many_uploads():
    import torch

    tables = [torch.full((4,), float(n)).pin_memory().to("npu", non_blocking=True) for n in range(400)]
    torch.npu.synchronize()
    return torch.stack(tables)[:, 0].cpu().tolist()


def test_pinned_sources_are_freed_when_their_copies_have_run(device):
    assert device.run(_many_uploads, timeout=60)[0] == [float(n) for n in range(400)]


def _reused_memory(recorded):
    import torch

    side = torch.npu.Stream()
    x = torch.ones(4, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.sum()
    if recorded:
        x.record_stream(side)
    place = x.data_ptr()
    del x
    with _device().Trace() as trace:
        y = torch.zeros(4, device="npu")
    return y.data_ptr() == place, trace.counts["races"]


def test_memory_that_is_reused_under_another_stream_is_a_race_unless_recorded(device):
    assert device.run(_reused_memory, False)[0] == (True, 1)
    assert device.run(_reused_memory, True)[0] == (True, 0)


def _out_of_memory():
    import torch

    with _device().planted(memory_limit=1 << 20):
        try:
            torch.empty(1 << 20, device="npu")
        except torch.OutOfMemoryError as error:
            return str(error)
    return torch.empty(1 << 20, device="npu").numel()


def test_memory_can_end(device):
    assert "NPU out of memory" in device.run(_out_of_memory)[0]


def _gaps(names):
    import threading

    import torch

    x, n = torch.ones(4, device="npu"), torch.ones(4, dtype=torch.int64, device="npu")
    d = torch.ones(2, 2, dtype=torch.float64, device="npu")
    pinned: list[object] = []

    def pin():
        try:
            pinned.append(torch.empty(2, pin_memory=True))
        except RuntimeError as error:
            pinned.append(error)

    def pin_elsewhere():
        thread = threading.Thread(target=pin)
        thread.start()
        thread.join()
        if isinstance(pinned[0], Exception):
            raise pinned[0]

    tries = {
        "float64_reductions": d.sum,
        "float64_matmul": lambda: d @ d,
        "int64_sums": n.sum,
        "complex": lambda: torch.complex(x, x),
        "pin_memory_threads": pin_elsewhere,
        "frexp": lambda: torch.frexp(x),
    }
    missing = []
    with _device().gaps(*names):
        for name, attempt in tries.items():
            try:
                attempt()
            except RuntimeError as error:
                assert "gap" in str(error)
                missing.append(name)
    return missing


def test_each_gap_takes_away_what_it_names_and_nothing_else(device):
    gaps = device.run(_gaps, [])[0]
    assert gaps == []
    for name in _device().GAPS:
        assert device.run(_gaps, [name])[0] == [name]


def _random():
    import torch

    torch.manual_seed(3)
    first = torch.rand(3, device="npu").cpu()
    host = torch.get_rng_state()
    torch.rand(3, device="npu")
    untouched = torch.equal(host, torch.get_rng_state())
    torch.npu.manual_seed_all(3)
    return untouched, torch.equal(first, torch.rand(3, device="npu").cpu())


def test_the_device_has_a_generator_of_its_own(device):
    assert device.run(_random)[0] == (True, True)


def _custom_operator():
    import torch

    library = torch.library.Library("simulated_test", "DEF")
    library.define("fill_twice(Tensor x, Tensor(a!) slots) -> ()")

    def fill_twice(x, slots):
        assert x.device.type == "cpu"
        slots.copy_(x.sum() * 2)

    library.impl("fill_twice", fill_twice, "CPU")
    x, slots = torch.ones(4, device="npu"), torch.zeros(1, device="npu")
    with _device().Trace() as trace:
        torch.ops.simulated_test.fill_twice(x, slots)
    return trace.counts["launches"], trace.counts["syncs"], slots.item()


def test_a_custom_operator_with_a_host_kernel_is_one_launch(device):
    assert device.run(_custom_operator)[0] == (1, 0, 8.0)


def _named_cuda():
    import torch

    x = torch.ones(2, device="cuda")
    return str(x.device), x.is_cuda, x.type(), torch.cuda.is_available(), str(torch.ones(2).cuda().device)


def test_scripts_written_for_cuda_find_the_device(device):
    assert device.run(_named_cuda)[0] == ("npu:0", True, "torch.cuda.FloatTensor", True, "npu:0")
