"""The call stack of the training code at a site, taken once a site."""

from __future__ import annotations

import os
import sys

_DEPTH = 24
_LEFT_OUT = (
    "/torch/nn/modules/",
    "/torch/overrides.py",
    "/torch/nn/functional.py",
    "/torch/_tensor.py",
)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_DEMO = os.path.join(_PACKAGE, "demo") + os.sep  # training code like any other


def call_stack(skip: int = 2) -> list[str]:
    """Lines ``file:line function``, innermost first, without frames of torch's module call and of this kit.

    Example::

        call_stack()[0]     # 'pretrain_gpt.py:61 forward_step'
    """
    frame = sys._getframe(skip)
    lines: list[str] = []
    kit = _own_folders()
    while frame is not None and len(lines) < _DEPTH:
        code = frame.f_code
        file = code.co_filename.replace("\\", "/")
        own = code.co_filename.startswith(kit) and not code.co_filename.startswith(_DEMO)
        if not own and not any(part in file for part in _LEFT_OUT):
            lines.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return lines


def _own_folders() -> tuple[str, ...]:
    """Where this kit's files are: the package, and the patches, which a checkout keeps beside it."""
    patches = getattr(sys.modules.get("msprobe_megatron.patches"), "__file__", None)
    folders = [_PACKAGE, *([os.path.dirname(os.path.abspath(patches))] if patches else [])]
    return tuple(folder + os.sep for folder in folders)
