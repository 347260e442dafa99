"""Which backend is chosen, what is refused, and that a copy to the host is a copy."""

import sys
import types

import pytest
import torch

from msprobe_megatron.job import devices
from msprobe_megatron.job.devices import BackendError, megatron_on_cpu, npu
from msprobe_megatron.job.devices.base import AcceleratorBackend


@pytest.fixture
def machine(monkeypatch):
    """Pretend that nothing is installed in this process and that some devices are there."""

    def pretend(*present):
        monkeypatch.setattr(megatron_on_cpu, "_installed", False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in present)
        module = types.SimpleNamespace(is_available=lambda: "npu" in present)
        monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
        monkeypatch.setattr(torch, "npu", module, raising=False)

    return pretend


@pytest.mark.parametrize(
    ("present", "name", "expected"),
    [
        ((), "auto", "cpu"),
        (("cuda",), "auto", "cuda"),
        (("cuda", "npu"), "auto", "npu"),
        (("npu",), "npu", "npu"),
        (("cuda",), "cpu", "cpu"),
    ],
)
def test_select(machine, present, name, expected):
    machine(*present)
    assert devices.select(name).name == expected


@pytest.mark.parametrize(
    ("present", "name", "message"),
    [
        ((), "cuda", r"'cuda' is not usable here: this process has no accelerator( \(.*\))?; accepted: auto, cpu"),
        (("cuda",), "npu", r"'npu' is not usable here: this process can use cuda; accepted: auto, cuda"),
        (("cuda", "npu"), "cuda", r"this process can use npu"),
        ((), "tpu", r"'tpu' is not a backend; accepted: auto, cpu, cuda, npu"),
    ],
)
def test_select_refuses(machine, present, name, message):
    machine(*present)
    with pytest.raises(BackendError, match=message):
        devices.select(name)


def test_emulation_is_not_taken_for_an_accelerator(monkeypatch):
    assert megatron_on_cpu.installed()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.accelerator_name() is None
    with pytest.raises(BackendError, match="no accelerator"):
        devices.select("cuda")


def test_float_type_and_device(machine, monkeypatch):
    machine("npu")
    assert devices.select().float_dtype is torch.float32
    machine("cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    chosen = devices.select()
    assert (chosen.float_dtype, chosen.device) == (torch.float64, torch.device("cuda", 3))
    host = devices.select("cpu")
    assert (host.float_dtype, host.device) == (torch.float64, torch.device("cpu"))


def test_torch_npu_without_its_libraries_is_no_npu(monkeypatch, tmp_path):
    (tmp_path / "torch_npu.py").write_text("raise OSError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert not npu.usable()


class _Event:
    def __init__(self, log):
        self.log = log

    def record(self):
        self.log.append("record")

    def synchronize(self):
        self.log.append("synchronize")


def _backends():
    fake = types.SimpleNamespace(Event=lambda: _Event([]), current_device=lambda: 0)
    return [devices.select("cpu"), AcceleratorBackend("cuda", fake, torch.float64)]


@pytest.mark.parametrize("backend", _backends(), ids=["cpu", "cuda"])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1.0, float("nan")], [float("-inf"), -0.0]]),
        torch.arange(6, dtype=torch.int64).view(2, 3).t(),
        torch.tensor(True),
        torch.empty(0, 3),
        torch.ones(4, requires_grad=True)[::2],
    ],
    ids=["nan", "strided", "scalar", "empty", "grad"],
)
def test_host_copy_is_independent(backend, tensor):
    expected = tensor.detach().numpy().copy()
    copy = backend.to_host(tensor)
    tensor.detach().fill_(7)
    arrived = copy.wait()
    assert arrived.device.type == "cpu" and not arrived.requires_grad
    assert arrived.dtype == tensor.dtype and arrived.is_contiguous()
    assert arrived.numpy().tobytes() == expected.tobytes()
    assert copy.wait() is arrived


def test_accelerator_waits_for_the_event_once():
    log = []
    fake = types.SimpleNamespace(Event=lambda: _Event(log), current_device=lambda: 0)
    copy = AcceleratorBackend("cuda", fake, torch.float64).to_host(torch.ones(2))
    assert log == ["record"]
    copy.wait()
    copy.wait()
    assert log == ["record", "synchronize"]
