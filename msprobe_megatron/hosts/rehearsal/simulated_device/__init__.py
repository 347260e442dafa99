"""A simulated accelerator: a PrivateUse1 backend named `npu`, with the stand-in for torch_npu on top of it.

Kernels are the host's, so numbers are those of a CPU run; what is simulated is everything around them. The host cannot
read device memory, each operator is a counted launch, each wait of the host is counted and traced, and what a copy,
another stream or a collective has not delivered yet reads as poison (0xFF: NaN, or -1). docs/device.md says what is not
simulated.

    from msprobe_megatron.hosts.rehearsal import simulated_device

    simulated_device.install()              # before anything imports torch_npu
    with simulated_device.Trace() as trace:
        torch.ones(8, device="npu").sum().item()
    trace.counts["launches"], trace.waits

Never used in a job that has a real accelerator: `install` refuses there. Tests and rehearsals only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from msprobe_megatron.hosts.rehearsal.simulated_device.trace import Entry, Trace
from msprobe_megatron.job.devices import BackendError, accelerator_name, megatron_on_cpu

__all__ = ["FAULTS", "GAPS", "Entry", "Trace", "extension", "gaps", "install", "installed", "planted"]

GAPS = ("float64_reductions", "float64_matmul", "int64_sums", "complex", "pin_memory_threads", "frexp")
"""What `gaps` can take away; torch_npu or the hardware below it lacks each in some release."""
FAULTS = (
    "skip_event_synchronize",
    "skip_stream_wait",
    "skip_work_wait",
    "copy_microseconds",
    "memory_limit",
)
"""What `planted` can break: a number of waits that do nothing, the time of a copy to the host, the bytes of memory."""
_DEFAULTS = {"copy_microseconds": 100}


class _State:
    """The one device of this process."""

    extension: Any = None


def installed() -> bool:
    """Tell whether `install` has run in this process."""
    return _State.extension is not None


def extension() -> Any:
    """The compiled module; raises `BackendError` before `install`."""
    if _State.extension is None:
        raise BackendError("simulated device: not installed in this process; call simulated_device.install() first")
    return _State.extension


def install(timeout: float = 600.0) -> None:
    """Build (once for this user) and load the device, and make it this process's `npu`; a second call does nothing.

    Raises `BackendError` where a real accelerator or torch_npu is there, or the CPU emulation is in place, and
    `BuildError` where no compiler is.
    """
    if installed():
        return
    if megatron_on_cpu.installed():
        raise BackendError("simulated device: the CPU emulation of Megatron is installed in this process")
    if "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is not None:
        raise BackendError(
            f"simulated device: torch_npu is installed in {sys.executable}, and the simulation would shadow it;"
            " accepted: a machine with an NPU, or an environment without torch_npu"
        )
    found = accelerator_name()
    if found is not None:
        raise BackendError(f"simulated device: this process can use {found}; the simulation would shadow it")

    from msprobe_megatron.hosts.rehearsal import finding
    from msprobe_megatron.hosts.rehearsal.simulated_device import device_module, loader, process_group

    loaded = loader.load(timeout)
    device_module.register(loaded)
    process_group.register(loaded)
    _State.extension = loaded
    finding.offer(finding.NPU)
    importlib.import_module("torch_npu")


@contextlib.contextmanager
def gaps(*names: str) -> Iterator[None]:
    """Take operators away for a while, by the names in `GAPS`."""
    loaded = extension()
    for name in names:
        loaded.set_gap(name, True)
    try:
        yield
    finally:
        for name in names:
            loaded.set_gap(name, False)


@contextlib.contextmanager
def planted(**faults: int) -> Iterator[None]:
    """Break the device for a while, by the names in `FAULTS`: ``planted(skip_event_synchronize=1)`` makes the next
    wait for an event return at once.
    """
    loaded = extension()
    for name, value in faults.items():
        loaded.plant(name, value)
    try:
        yield
    finally:
        for name in faults:
            loaded.plant(name, _DEFAULTS.get(name, 0))
