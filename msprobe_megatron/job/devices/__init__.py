"""Device backends: the few lines that differ by device. `megatron_on_cpu` makes Megatron itself run on CPU.

`select()` returns the backend of this process: npu, else cuda, else cpu. Only the writer thread may wait for what
`backend.to_host(tensor)` returns.
"""

from __future__ import annotations

from msprobe_megatron.job.devices import cuda, megatron_on_cpu, npu
from msprobe_megatron.job.devices.base import Backend, BackendError, HostBackend, HostCopy

__all__ = ["Backend", "BackendError", "HostCopy", "accelerator_name", "megatron_on_cpu", "select"]

NAMES = ("auto", "cpu", "cuda", "npu")


def accelerator_name() -> str | None:
    """The accelerator that this process can use: "npu", "cuda" or None.

    Where the CPU emulation is installed the answer is None by construction: it refuses to install beside an
    accelerator, and afterwards `torch.cuda` no longer says what is there.
    """
    if megatron_on_cpu.installed():
        return None
    # NPU first: transfer_to_npu makes torch.cuda claim that CUDA is available.
    if npu.usable():
        return "npu"
    return "cuda" if cuda.usable() else None


def select(name: str = "auto") -> Backend:
    """Return the backend `name`; for "auto", that of the accelerator or else of the CPU.

    Example:
        >>> select("cpu").name
        'cpu'

    """
    if name not in NAMES:
        raise BackendError(f"backend: {name!r} is not a backend; accepted: {', '.join(NAMES)}")
    if name == "cpu":
        return HostBackend()
    found = accelerator_name()
    if name not in ("auto", found):
        there = f"this process can use {found}" if found else _no_accelerator()
        raise BackendError(f"backend: {name!r} is not usable here: {there}; accepted: auto, {found or 'cpu'}")
    if found is None:
        return HostBackend()
    return npu.backend() if found == "npu" else cuda.backend()


def _no_accelerator() -> str:
    why = None if megatron_on_cpu.installed() else npu.why_not()
    return f"this process has no accelerator ({why})" if why else "this process has no accelerator"
