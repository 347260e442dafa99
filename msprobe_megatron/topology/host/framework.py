"""Versions, training arguments and the current iteration of the host framework."""

from __future__ import annotations

import importlib
import platform
import re
import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

# Arguments whose values must never be written to a file that may be shared.
_SECRET = re.compile(r"(^|[_-])(token|key|secret|password|passwd|credentials?)$", re.IGNORECASE)


def megatron_arguments() -> Any | None:
    """Megatron-LM's own argument namespace, if megatron.training is imported and has parsed it."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None) if module is not None else None


def megatron_iteration() -> int | None:
    """Number of optimizer steps completed so far, including those before a resume; None outside Megatron-LM.

    Releases without `curr_iteration` only keep the number they resumed from, in `iteration`; callers count from there.
    """
    value = getattr(megatron_arguments(), "curr_iteration", None)
    return int(value) if isinstance(value, int) else None


def resumed_iteration() -> int:
    """Iteration from which the job started (0 for a new one)."""
    value = getattr(megatron_arguments(), "iteration", None)
    return int(value) if isinstance(value, int) else 0


def rerunning() -> bool:
    """Whether Megatron's rerun machine is repeating a step that has already been run in this process."""
    module = sys.modules.get("megatron.core.rerun_state_machine")
    machine = getattr(module, "_GLOBAL_RERUN_STATE_MACHINE", None)
    return getattr(getattr(machine, "state", None), "name", "") == "RERUNNING_IN_PLACE"


def plain(arguments: Any) -> dict[str, Any]:
    """A namespace as JSON-able values; secrets are masked, other objects become their text.

    Example::

        >>> import argparse
        >>> plain(argparse.Namespace(lr=0.1, wandb_api_key="x"))
        {'lr': 0.1, 'wandb_api_key': '***'}
    """
    items = vars(arguments) if not isinstance(arguments, dict) else arguments
    return {str(k): "***" if _SECRET.search(str(k)) and v else _plain(v) for k, v in items.items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict | SimpleNamespace | Namespace):  # --yaml-cfg makes namespaces inside namespaces
        return plain(value)
    return str(value)[:200]


def versions() -> dict[str, str]:
    """Versions of the imported packages that can change a result."""
    from msprobe_megatron import __version__

    found = {
        "msprobe_megatron": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in (
        "torch",
        "torch_npu",
        "numpy",
        "transformer_engine",
        "triton",
        "apex",
        "mindspeed",
        "mindspeed_llm",
    ):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    if "megatron.core" in sys.modules:
        found["megatron-core"] = _core_version()
    return found


def _core_version() -> str:
    """Version of the imported package, not of a distribution: ModelLink copies the folder beside its script."""
    try:
        # megatron-core 0.6 and 0.7 do not import it themselves.
        return str(importlib.import_module("megatron.core.package_info").__version__)
    except (ImportError, AttributeError):
        return "unknown"
