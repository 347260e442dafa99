"""When the emulation goes in, when it refuses, and what torch.cuda means afterwards."""

import subprocess
import sys

import pytest
import torch

from msprobe_megatron.job.devices import BackendError, megatron_on_cpu


def test_installing_twice_changes_nothing():
    before = torch.zeros, torch.Tensor.to, torch.distributed.new_group, list(sys.meta_path)
    megatron_on_cpu.install()
    assert before == (torch.zeros, torch.Tensor.to, torch.distributed.new_group, list(sys.meta_path))
    assert megatron_on_cpu.installed()


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_never_beside_an_accelerator(monkeypatch, device):
    monkeypatch.setattr(megatron_on_cpu, "_installed", False)
    monkeypatch.setattr("msprobe_megatron.job.devices.cuda.usable", lambda: device == "cuda")
    monkeypatch.setattr("msprobe_megatron.job.devices.npu.usable", lambda: device == "npu")
    zeros = torch.zeros
    with pytest.raises(BackendError, match=f"can use {device}"):
        megatron_on_cpu.install()
    assert torch.zeros is zeros and not megatron_on_cpu.installed()


def _python(*lines):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(lines)], capture_output=True, text=True)


def test_too_late_is_refused_and_leaves_torch_alone():
    done = _python(
        "import sys, types, torch",
        "sys.modules['megatron.core'] = types.ModuleType('megatron.core')",
        "sys.modules['megatron.core.parallel_state'] = types.ModuleType('megatron.core.parallel_state')",
        "from msprobe_megatron.job.devices import BackendError, megatron_on_cpu",
        "zeros, available = torch.zeros, torch.cuda.is_available",
        "try: megatron_on_cpu.install()",
        "except BackendError as error: print(error)",
        "print(megatron_on_cpu.installed(), zeros is torch.zeros, available is torch.cuda.is_available)",
    )
    assert "called too late, megatron.core is already imported" in done.stdout, done.stderr
    assert "False True True" in done.stdout


def test_importing_the_backends_changes_nothing():
    done = _python(
        "import sys, torch",
        "modules = torch, torch.cuda, torch.distributed, torch.Tensor",
        "before, finders = [dict(vars(module)) for module in modules], list(sys.meta_path)",
        "import msprobe_megatron.job.devices",
        "print(all(old.items() <= vars(module).items() for old, module in zip(before, modules)))",
        "print(finders == sys.meta_path)",
        "print([name for name in sys.modules if name.startswith('megatron')])",
    )
    assert done.stdout.split() == ["True", "True", "[]"], done.stderr


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 0), 0])
def test_tensors_asked_for_on_cuda_are_on_the_cpu(device):
    made = [
        torch.zeros(2, device=device),
        torch.tensor([1.0], device=device),
        torch.empty_like(torch.ones(2), device=device),
        torch.ones(2).new_zeros(3, device=device),
        torch.ones(2).to(device),
        torch.ones(2).to(device=device, dtype=torch.float64),
        torch.ones(2).to(device, non_blocking=True),
        torch.ones(2).cuda(device),
        torch.ones(2).cuda(),
        torch.nn.Linear(2, 2, device=device).to(device).cuda().weight,
        torch.empty(2, pin_memory=True).pin_memory(),
    ]
    assert {tensor.device for tensor in made} == {torch.device("cpu")}
    assert made[5].dtype is torch.float64


def test_other_moves_are_left_alone():
    tensor = torch.ones(2)
    assert tensor.to(torch.float16).dtype is torch.float16
    assert tensor.to(torch.zeros(1, dtype=torch.int32)).dtype is torch.int32
    assert tensor.to("meta").device.type == "meta"
    assert torch.zeros(2, device="meta").device.type == "meta"


def test_type_names_are_those_of_cuda():
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype is torch.float16
    assert torch.ones(1).type(torch.cuda.LongTensor).dtype is torch.int64
    assert torch.ones(1).type(torch.float64).dtype is torch.float64
    assert torch.cuda.LongTensor([3]).tolist() == [3]
    assert isinstance(torch.ones(1), torch.cuda.FloatTensor)
    assert not isinstance(torch.ones(1), torch.cuda.HalfTensor)


def test_random_state_of_cuda_is_restored():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), drawn)
    torch.cuda.default_generators[0].set_state(state)
    assert torch.equal(torch.rand(4), drawn)
    assert torch.equal(torch.rand(4, generator=torch.Generator().manual_seed(5)), drawn)


def test_lazy_calls_run_at_once():
    seen = []
    torch.cuda._lazy_call(lambda: seen.append(1))
    assert seen == [1]


def test_megatron_tracker_restores_the_stream_it_left():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("one", 11)
    torch.manual_seed(3)
    outside = torch.rand(2, generator=torch.Generator().manual_seed(3))
    with tracker.fork("one"):
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), outside)
    with tracker.fork("one"):
        second = torch.rand(2)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(11))
    assert torch.equal(torch.cat((first, second)), expected)


def test_streams_and_events_are_there_and_idle():
    stream = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream), torch.cuda.device(0):
        start.record()
        stream.wait_stream(torch.cuda.current_stream())
        torch.ones(1).record_stream(stream)
        end.record(stream)
    torch.cuda.synchronize()
    assert end.query() and start.elapsed_time(end) >= 0.0
    torch.cuda.nvtx.range_push("x")
    assert torch.cuda.nvtx.range_pop() == 0


def test_device_queries_describe_the_host(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.device_count() == 4
    assert torch.cuda.is_available() is False
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.cuda.get_device_properties(0).major == torch.cuda.get_device_capability()[0]
    assert torch.cuda.memory_stats()["anything"] == 0 == torch.cuda.max_memory_allocated()


def test_compile_is_the_identity():
    def double(x):
        return 2 * x

    assert torch.compile(double) is double
    assert torch.compile(dynamic=True)(double) is double
    # ModelLink puts the one in the place of the other.
    assert torch.jit.script(double) is double
    assert isinstance(torch.jit.script(torch.nn.ReLU()), torch.jit.ScriptModule)


def test_npu_is_a_device_too():
    assert torch.zeros(2, device="npu").device.type == "cpu"
    assert torch.ones(1).to("npu:0").device.type == "cpu"


def test_integers_are_counted_as_devices_do():
    counted = torch.histc(torch.tensor([3, 1, 3, 0]), bins=4, min=0, max=3)
    assert counted.tolist() == [1, 1, 0, 2] and counted.dtype == torch.int64
    assert torch.histc(torch.tensor([0.0, 1.0]), bins=2).dtype == torch.float32


def test_metadata_of_wrapped_functions_is_kept():
    assert torch.Tensor.to.__name__ == "to"
    assert torch.zeros.__name__ == "zeros" and torch.zeros.__doc__
    assert torch.distributed.all_gather.__module__ == "torch.distributed.distributed_c10d"
