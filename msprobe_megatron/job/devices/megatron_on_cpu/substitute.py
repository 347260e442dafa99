"""Replacing a function of torch by its CPU counterpart, for the life of the process.

Nothing is restored, and the function may not exist on a build without CUDA: unlike `job.patching`, this is a
definition and not a patch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


def substitute(owners: tuple[Any, ...], name: str, new: Callable[..., Any]) -> None:
    """Bind `new` as `name` in every owner, with the metadata of what it replaces.

    Several owners, because torch re-exports: `torch.cuda.f` is `torch.cuda.memory.f`.

    Example:
        >>> substitute((torch.cuda,), "synchronize", lambda device=None: None)

    """
    original = getattr(owners[0], name, None)
    if original is not None:
        new = functools.wraps(original)(new)
    for owner in owners:
        setattr(owner, name, new)


def constant(value: Any) -> Callable[..., Any]:
    """A function that accepts any arguments and returns `value`."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def names_cuda(device: Any) -> bool:
    """Whether `device` means an accelerator in a torch call: "cuda:0", torch.device("cuda"), 0."""
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    if isinstance(device, str):
        return device.startswith(("cuda", "npu"))  # MindSpeed uses the second
    return isinstance(device, int) and not isinstance(device, bool)
