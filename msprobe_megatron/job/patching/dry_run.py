"""Which patches would bind to the Megatron that is installed here: tried for real, then taken back."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import Any

from msprobe_megatron import backends
from msprobe_megatron.patching import Patch, PatchError, PatchSet, declared, host_version


class _Nobody:
    """Events that nobody waits for."""


def installed_patches() -> tuple[list[dict[str, Any]], str]:
    """Ledger of all declared patches against the importable Megatron, and a title that names its version."""
    if backends.select().name == "cpu":
        from msprobe_megatron.backends import cpu

        cpu.install()
    patches: list[Patch] = declared("arguments", "functions", "recording", "gradients")
    broken: list[str] = []
    with warnings.catch_warnings():
        # What Megatron lacks here (TransformerEngine, Apex) is not the question.
        warnings.simplefilter("ignore")
        for patch in patches:
            for target in patch.targets:
                module = target.partition(":")[0]
                try:
                    importlib.import_module(module)
                except ImportError as error:
                    # One that is there and lacks another part of itself is not the same as none.
                    if error.name and not module.startswith(error.name):
                        broken.append(str(error))
    found = PatchSet(patches, _Nobody())
    # A required target that is missing is what the table is there to show.
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
