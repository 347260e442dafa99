"""Dry run: apply all patches to the installed Megatron, report which of them bind, revert."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import Any

from msprobe_megatron.job import devices
from msprobe_megatron.job.patching.attributes import PatchError
from msprobe_megatron.job.patching.patch_set import Patch, PatchSet, declared, host_version


class _NoEvents:
    """Stands in for the session; no patched function is called."""


def installed_patches() -> tuple[list[dict[str, Any]], str]:
    """Ledger of all declared patches against the importable Megatron, and a title that names its version."""
    if devices.select().name == "cpu":
        from msprobe_megatron.job.devices import megatron_on_cpu

        megatron_on_cpu.install()
    patches: list[Patch] = declared("arguments", "functions", "recording", "gradients")
    broken: list[str] = []
    with warnings.catch_warnings():
        # Warnings about missing optional packages (TransformerEngine, Apex) do not matter here.
        warnings.simplefilter("ignore")
        for patch in patches:
            for target in patch.targets:
                module = target.partition(":")[0]
                try:
                    importlib.import_module(module)
                except ImportError as error:
                    # Megatron is installed but one of its own dependencies is missing: report that one.
                    if error.name and not module.startswith(error.name):
                        broken.append(str(error))
    found = PatchSet(patches, _NoEvents())
    # The table is there to show a required target that is missing.
    with contextlib.suppress(PatchError):
        found.apply()
    ledger = found.ledger()
    found.revert()
    return ledger, f"patches on {_found(broken)} (nothing stays patched)"


def _found(broken: list[str]) -> str:
    version = host_version()
    if version != "not imported":
        return f"megatron-core {version}"
    return f"a megatron-core that cannot be imported: {broken[0]}" if broken else "no megatron-core is installed here"
