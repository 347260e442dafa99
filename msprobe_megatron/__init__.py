"""A probe laid over Megatron training jobs: dump, perturb, monitor, compare.

Importing this package costs nothing: it loads no torch, no Megatron and none of its own modules, so that a job that
does not use the probe does not pay for it.
"""

import os.path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from msprobe_megatron.analysis.python_api import LoadedRun, compare, diagnose, load
    from msprobe_megatron.job.session.precision_debugger import PrecisionDebugger
    from msprobe_megatron.job.session.save import save
    from msprobe_megatron.job.session.seed_all import seed_all
    from msprobe_megatron.job.session.session import Session, attach

__all__ = [
    "LoadedRun",
    "PrecisionDebugger",
    "Session",
    "__version__",
    "attach",
    "compare",
    "diagnose",
    "load",
    "save",
    "seed_all",
]
_HOME = {
    "attach": "job.session.session",
    "Session": "job.session.session",
    "PrecisionDebugger": "job.session.precision_debugger",
    "save": "job.session.save",
    "seed_all": "job.session.seed_all",
    "load": "analysis.python_api",
    "compare": "analysis.python_api",
    "diagnose": "analysis.python_api",
    "LoadedRun": "analysis.python_api",
}
# Import paths that users type (docs, recipes): one-line re-exports in a folder of their own.
__path__.append(os.path.join(os.path.dirname(__file__), "cli", "import_paths"))


def __getattr__(name: str) -> Any:
    """Import public names on first use."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
