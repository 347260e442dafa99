"""Who asked torch for an operation: the function of the kit or of the training code, or the autograd node.

Frames of torch are passed over, and so are those of the kit's wrappers where they only pass a call of the training
code on. For the profiles of memory and of counts; far too slow for anything else.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

_KIT = "msprobe_megatron."
_TRAINING = ("lab.demo",)
_SKIPPED = ("lab.bench", "job.devices")
_FORWARDING = ("job.sites", "patches", "job.patching", "job.session.patch_scopes")
_ENGINE = "_engine_run_backward"


def caller(operation: str) -> tuple[str, bool]:
    """Who is calling, with the operation, and whether it is the kit for its own sake."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if function == _ENGINE:
            return f"{_node()} → {operation}", False
        where = module.removeprefix(_KIT)
        if module.startswith(_KIT) and not where.startswith(_TRAINING):
            # The kit switches torch functions off while it works, so that it does not see itself.
            own = not where.startswith(_FORWARDING) or not torch._C._is_torch_function_enabled()
            if own and not where.startswith(_SKIPPED):
                return f"{where}.{function} → {operation}", True
        elif module.partition(".")[0] != "torch":
            return f"{module}.{function} → {operation}", False
        frame = frame.f_back
    return operation, False


def _node() -> str:
    """What the autograd engine is at."""
    current: Any = getattr(torch._C, "_current_autograd_node", lambda: None)()
    return str(current.name()) if current is not None else "backward"
