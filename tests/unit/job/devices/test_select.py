"""Which backend is chosen, what is refused, and that a copy to the host is a copy."""

import sys
import types

import pytest
import torch

from msprobe_megatron import backends
from msprobe_megatron.backends import BackendError, cpu, npu
from msprobe_megatron.backends.accelerator import AcceleratorBackend


@pytest.fixture
def machine(monkeypatch):
    """Pretend that nothing is installed in this process and that some devices are there."""

    def pretend(*devices):
        monkeypatch.setattr(cpu, "_installed", False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in devices)
        module = types.SimpleNamespace(is_available=lambda: "npu" in devices)
        monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
        monkeypatch.setattr(torch, "npu", module, raising=False)

    return pretend


@pytest.mark.parametrize(
    ("devices", "name", "expected"),
    [
        ((), "auto", "cpu"),
        (("cuda",), "auto", "cuda"),
        (("cuda", "npu"), "auto", "npu"),
        (("npu",), "npu", "npu"),
        (("cuda",), "cpu", "cpu"),
    ],
)
def test_select(machine, devices, name, expected):
    machine(*devices)
    assert backends.select(name).name == expected


@pytest.mark.parametrize(
    ("devices", "name", "message"),
    [
        ((), "cuda", r"'cuda' is not usable here: this process has no accelerator; accepted: auto, cpu"),
        (("cuda",), "npu", r"'npu' is not usable here: this process can use cuda; accepted: auto, cuda"),
        (("cuda", "npu"), "cuda", r"this process can use npu"),
        ((), "tpu", r"'tpu' is not a backend; accepted: auto, cpu, cuda, npu"),
    ],
)
def test_select_refuses(machine, devices, name, message):
    machine(*devices)
    with pytest.raises(BackendError, match=message):
        backends.select(name)


def test_emulation_is_not_taken_for_an_accelerator(monkeypatch):
    assert cpu.installed()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backends.accelerator_name() is None
    with pytest.raises(BackendError, match="no accelerator"):
        backends.select("cuda")


def test_float_type_and_device(machine, monkeypatch):
    machine("npu")
    assert backends.select().float_dtype is torch.float32
    machine("cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    chosen = backends.select()
    assert (chosen.float_dtype, chosen.device) == (torch.float64, torch.device("cuda", 3))
    host = backends.select("cpu")
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
    return [backends.select("cpu"), AcceleratorBackend("cuda", fake, torch.float64)]


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
