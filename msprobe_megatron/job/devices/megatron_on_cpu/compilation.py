"""`torch.compile` and `torch.jit.script` of a function as the identity: Megatron's jit_fuser is one or the other.

The first would spend half a minute compiling for a test, the second (which ModelLink puts in its place) cannot read
the tensor methods that the emulation has replaced.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from msprobe_megatron.job.devices.megatron_on_cpu.substitute import substitute


def _compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    return (lambda function: function) if model is None else model


def install() -> None:
    """Replace torch.compile, called as a function or as a decorator with options, and torch.jit.script."""
    script = torch.jit.script

    def script_of_classes(target: Any, *args: Any, **kwargs: Any) -> Any:
        return target if inspect.isfunction(target) else script(target, *args, **kwargs)

    substitute((torch,), "compile", _compile)
    substitute((torch.jit,), "script", script_of_classes)
