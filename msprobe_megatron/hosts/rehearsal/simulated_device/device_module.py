"""`torch.npu` of the simulated device, with the functions of torch_npu that training scripts call."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend

NAME = "SimulatedAscend"
_LEGACY_TYPES = {
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
}


class _DeviceContext:
    """`torch.npu.device(...)`: the device inside a with block."""

    loaded: Any

    def __init__(self, device: Any) -> None:
        self.idx = index_of(self.loaded, device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = self.loaded.current_device()
        self.loaded.set_device(self.idx)

    def __exit__(self, *_exc: object) -> None:
        self.loaded.set_device(self._before)


class StreamContext:
    """`torch.npu.stream(...)`: the current stream inside a with block; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream
        self._before: torch.Stream | None = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = torch.accelerator.current_stream()
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_exc: object) -> None:
        if self._before is not None:
            torch.accelerator.set_stream(self._before)


def index_of(loaded: Any, device: Any) -> int:
    """The number of a device given as None, a number, a string or a torch.device."""
    if isinstance(device, str):
        device = torch.device(device.replace("cuda", "npu"))
    index = device.index if isinstance(device, torch.device) else device
    return int(loaded.current_device()) if index is None or index < 0 else int(index)


def register(loaded: Any) -> None:
    """Make `torch.npu` of the extension, and `Tensor.npu`, `Module.npu` with it."""
    module: Any = types.ModuleType("torch_npu.npu")
    _add_devices(module, loaded)
    _add_memory(module, loaded)
    _add_generators(module, loaded)
    _add_streams(module, loaded)
    for name, dtype in _LEGACY_TYPES.items():
        setattr(module, f"{name}Tensor", _legacy_type(dtype))
    torch._register_device_module("npu", module)  # type: ignore[no-untyped-call]
    sys.modules["torch.npu"] = sys.modules["torch_npu.npu"] = module
    generate_methods_for_privateuse1_backend()


def _add_devices(module: Any, loaded: Any) -> None:
    properties = types.SimpleNamespace(name=NAME, major=9, minor=1, multi_processor_count=1, warp_size=32)
    properties.total_memory = loaded.total_memory()
    module.is_available = module.is_initialized = lambda: True
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.current_device = loaded.current_device
    module.device_count = loaded.device_count
    module.set_device = lambda device: loaded.set_device(index_of(loaded, device))
    module.device = type("device", (_DeviceContext,), {"loaded": loaded})
    module.get_device_name = lambda device=None: NAME
    module.get_device_properties = lambda device=None: properties
    module.get_device_capability = lambda device=None: (9, 1)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.is_bf16_supported = lambda: True
    module.is_current_stream_capturing = lambda: False
    module.set_compile_mode = lambda jit_compile=False: None


def _add_memory(module: Any, loaded: Any) -> None:
    for name in ("memory_allocated", "memory_reserved"):
        setattr(module, name, lambda device=None: loaded.memory()[0])
        setattr(module, f"max_{name}", lambda device=None: loaded.memory()[1])
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated"):
        setattr(module, name, lambda device=None: loaded.reset_peak_memory())
    module.memory_stats = lambda device=None: {
        "allocated_bytes.all.current": loaded.memory()[0],
        "allocated_bytes.all.peak": loaded.memory()[1],
        "allocation.all.current": 0,
        "num_alloc_retries": 0,
    }
    module.mem_get_info = lambda device=None: (loaded.total_memory() - loaded.memory()[0], loaded.total_memory())
    module.empty_cache = lambda: None


def _add_generators(module: Any, loaded: Any) -> None:
    generators: tuple[torch.Generator, ...] = tuple(
        loaded.default_generator(index) for index in range(loaded.device_count())
    )

    def of(device: Any) -> torch.Generator:
        return generators[index_of(loaded, device)]

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(int(seed))

    module.default_generators = generators
    module.get_rng_state = lambda device=None: of(device).get_state()
    module.set_rng_state = lambda new_state, device=None: of(device).set_state(new_state)
    module.get_rng_state_all = lambda: [generator.get_state() for generator in generators]
    module.set_rng_state_all = lambda states: [g.set_state(s) for g, s in zip(generators, states, strict=True)]
    module.manual_seed = lambda seed: of(None).manual_seed(int(seed))
    module.manual_seed_all = seed_all
    module.seed = lambda: of(None).seed()
    module.initial_seed = lambda: of(None).initial_seed()


def _add_streams(module: Any, loaded: Any) -> None:
    class Stream(torch.Stream):
        """`torch.npu.Stream`."""

        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            if kwargs:
                return super().__new__(cls, **kwargs)
            return super().__new__(cls, device=torch.device("npu", index_of(loaded, device)), priority=priority)

    class Event(torch.Event):
        """`torch.npu.Event`."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            device = torch.device("npu", loaded.current_device())
            return super().__new__(cls, device=device, enable_timing=enable_timing)

    module.Stream, module.Event, module.stream = Stream, Event, StreamContext
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.default_stream = lambda device=None: torch.Stream(
        stream_id=0, device_index=index_of(loaded, device), device_type=torch._C._autograd.DeviceType.PrivateUse1.value
    )
    module.set_stream = torch.accelerator.set_stream


def _legacy_type(dtype: torch.dtype) -> Any:
    def make(*args: Any) -> torch.Tensor:
        if args and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=dtype, device="npu")
        return torch.empty(args, dtype=dtype, device="npu")

    return make
