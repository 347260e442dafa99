"""A probe laid over Megatron training jobs: dump, perturb, monitor, compare.

Importing this package is free: it loads no torch, no Megatron and none of its own parts, so that a job which
does not ask for the probe never pays for it.

Example::

    from msprobe_megatron import attach
    with attach(model, optimizer, "probe.yaml"):
        train(model, optimizer)
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from msprobe_megatron.attaching import attach
    from msprobe_megatron.debugger import PrecisionDebugger
    from msprobe_megatron.saving import save
    from msprobe_megatron.seeding import seed_all
    from msprobe_megatron.session import Session

__all__ = ["PrecisionDebugger", "Session", "__version__", "attach", "save", "seed_all"]
_HOME = {
    "attach": "attaching",
    "Session": "session",
    "PrecisionDebugger": "debugger",
    "save": "saving",
    "seed_all": "seeding",
}


def __getattr__(name: str) -> Any:
    """Load what is handed out on first use."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
