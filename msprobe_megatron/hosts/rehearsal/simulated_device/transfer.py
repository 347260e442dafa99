"""`torch.cuda` answered by the simulated device, as torch_npu.contrib.transfer_to_npu does for scripts written for
CUDA, and what Megatron needs besides on a device that compiles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.random
import torch.distributed as dist

from msprobe_megatron.job.devices.megatron_on_cpu import compilation, import_hook
from msprobe_megatron.job.devices.megatron_on_cpu.substitute import constant, substitute
from msprobe_megatron.job.devices.megatron_on_cpu.tensors import FACTORIES, histc_of_integers

_SAME_NAME = """
is_available is_initialized init _lazy_init current_device set_device device_count device synchronize Stream Event
stream current_stream default_stream set_stream memory_allocated max_memory_allocated memory_reserved
max_memory_reserved reset_peak_memory_stats memory_stats mem_get_info empty_cache get_rng_state set_rng_state
get_rng_state_all set_rng_state_all manual_seed manual_seed_all seed initial_seed get_device_name
get_device_properties get_device_capability default_generators is_bf16_supported is_current_stream_capturing
BoolTensor ByteTensor CharTensor ShortTensor IntTensor LongTensor FloatTensor DoubleTensor HalfTensor BFloat16Tensor
""".split()  # noqa: SIM905
_RANDOM = ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "seed", "initial_seed")
_DONE: list[bool] = []


def apply() -> None:
    """Replace the names; a second call does nothing. Call before the first import of megatron."""
    if _DONE:
        return
    _DONE.append(True)
    npu: Any = torch.npu  # type: ignore[attr-defined]
    cuda: Any = torch.cuda
    for name in _SAME_NAME:
        setattr(cuda, name, getattr(npu, name))
    for name in _RANDOM:
        setattr(torch.cuda.random, name, getattr(npu, name))
    cuda._lazy_call = lambda function, **_kwargs: function()
    for name in ("range_push", "range_pop", "mark"):
        substitute((torch.cuda.nvtx,), name, constant(0))
    _transfer_tensors()
    for name in ("init_process_group", "new_group"):
        substitute((dist, dist.distributed_c10d), name, _hccl(getattr(dist, name)))
    # torch.compile has no code generator for the device; Megatron's local layers lack parts without TransformerEngine.
    compilation.install()
    import_hook.install()


def _transfer_tensors() -> None:
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    for name in FACTORIES:
        setattr(torch, name, _on_npu(getattr(torch, name)))
    tensor.to, module.to = _on_npu(tensor.to), _on_npu(module.to)
    tensor.cuda = lambda self, device=None, non_blocking=False, **_kwargs: self.to("npu", non_blocking=non_blocking)
    module.cuda = lambda self, device=None: self.to("npu")
    tensor.is_cuda = property(lambda self: self.device.type == "npu")
    tensor.type = _type_as_cuda(tensor.type)
    torch.histc = histc_of_integers(torch.histc)


def _named(device: Any) -> Any:
    if isinstance(device, str) and device.startswith("cuda"):
        return "npu" + device[4:]
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("npu") if device.index is None else torch.device("npu", device.index)
    return device


def _on_npu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _named(kwargs["device"])
        return function(*[_named(arg) if isinstance(arg, str | torch.device) else arg for arg in args], **kwargs)

    return wrapped


def _type_as_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """`t.type()` answers "torch.cuda.FloatTensor": Megatron's optimizers sort parameters by that string."""

    @functools.wraps(function)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = function(self, *args, **kwargs)
        return found.replace("torch.npu.", "torch.cuda.") if isinstance(found, str) else found

    return type_


def _hccl(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = kwargs["backend"].replace("nccl", "hccl")
        return function(*[arg.replace("nccl", "hccl") if isinstance(arg, str) else arg for arg in args], **kwargs)

    return wrapped
