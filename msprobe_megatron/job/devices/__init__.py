"""The few lines that differ by device. `select` names the device of this process for `measure` and `record`;
`backends.cpu` makes Megatron itself run where there is no accelerator.

    from msprobe_megatron import backends
    backend = backends.select()            # npu, else cuda, else cpu
    block = backend.to_host(slots).wait()  # wait() belongs to the writer thread
"""

from __future__ import annotations

from . import cpu, cuda, npu
from .base import Backend, BackendError, HostCopy
from .host import HostBackend

__all__ = ["Backend", "BackendError", "HostCopy", "accelerator_name", "cpu", "select"]

NAMES = ("auto", "cpu", "cuda", "npu")


def accelerator_name() -> str | None:
    """Name the accelerator this process can use: "npu", "cuda" or None.

    Where the CPU emulation is installed the answer is None by construction: it refuses to install beside an
    accelerator, and afterwards `torch.cuda` can no longer be trusted to tell.
    """
    if cpu.installed():
        return None
    # NPU first: transfer_to_npu makes torch.cuda claim that CUDA is available.
    if npu.usable():
        return "npu"
    return "cuda" if cuda.usable() else None


def select(name: str = "auto") -> Backend:
    """Return the backend called `name`, or the best one there is.

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
        there = f"this process can use {found}" if found else "this process has no accelerator"
        raise BackendError(f"backend: {name!r} is not usable here: {there}; accepted: auto, {found or 'cpu'}")
    if found is None:
        return HostBackend()
    return npu.backend() if found == "npu" else cuda.backend()
