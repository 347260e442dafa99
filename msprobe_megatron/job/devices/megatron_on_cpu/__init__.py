"""Lets Megatron train on CPU and gloo, so that every layout can be tried, tested and demonstrated without an
accelerator. `install` emulates `torch.cuda` and the collectives on CPU and fixes a few Megatron modules as they are
imported; no Megatron file is edited. Nothing of it runs on a real device.

    from msprobe_megatron.job.devices import megatron_on_cpu
    megatron_on_cpu.install()                       # before the first import of megatron
    from megatron.core import parallel_state

Known limits: no CUDA graphs, no kernels of TransformerEngine, Apex or triton; processes that multiprocessing
spawns (Megatron-LM's torch_dist checkpoints do) start without the emulation, so save with `--ckpt-format
torch`; pipelines of two stages with virtual stages need `overlap_p2p_comm`, which Megatron-LM checks and
megatron-core does not.
"""

from __future__ import annotations

import sys

from msprobe_megatron.job.devices.base import BackendError

__all__ = ["install", "installed"]

_installed = False


def installed() -> bool:
    """Whether `install` has run in this process."""
    return _installed


def install() -> None:
    """Install the emulation. Idempotent.

    Raises BackendError where an accelerator is usable (the emulation would shadow it) and when megatron.core
    has already been imported (its modules keep the functions they bound at import).

    """
    global _installed  # noqa: PLW0603 (a process has one torch to patch)
    if _installed:
        return
    _refuse_beside_accelerator()
    _refuse_after_megatron()

    from msprobe_megatron.job.devices.megatron_on_cpu import (
        collectives,
        compilation,
        devices,
        import_hook,
        rng,
        streams,
        tensors,
    )

    for group in (devices, tensors, rng, streams, collectives, compilation, import_hook):
        group.install()
    _installed = True


def _refuse_beside_accelerator() -> None:
    from msprobe_megatron.job.devices import accelerator_name

    found = accelerator_name()
    if found is not None:
        raise BackendError(
            f"megatron_on_cpu.install: this process can use {found}; the CPU emulation would shadow it. "
            f"Hide the device (for example CUDA_VISIBLE_DEVICES='') or train on it"
        )


def _refuse_after_megatron() -> None:
    late = sorted(name for name in sys.modules if name == "megatron.core" or name.startswith("megatron.core."))
    if late:
        raise BackendError(
            f"megatron_on_cpu.install: called too late, {late[0]} is already imported; "
            f"call it before the first import of megatron"
        )
