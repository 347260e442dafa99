"""`seed_all`: the same random numbers and deterministic kernels in two runs, on explicit request only.

The only place of the kit that touches random generators; nothing else calls it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1"}
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_LARGEST_SEED = 2**32 - 1


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False, is_enhanced: bool = False) -> None:
    """Seed Python, NumPy and torch on all devices and ask for deterministic kernels.

    ``mode`` also refuses operators that have no deterministic form; ``rm_dropout`` turns every functional dropout into
    the identity. Megatron's own generators for tensor parallelism are seeded by Megatron (``--seed``). Raises
    `TypeError` or `ValueError` for an invalid argument.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: {seed!r} is not a whole number; accepted: 0..{_LARGEST_SEED}")
    if not 0 <= seed <= _LARGEST_SEED:
        raise ValueError(f"seed: {seed} is out of range; accepted: 0..{_LARGEST_SEED}")
    for name, value in (("mode", mode), ("rm_dropout", rm_dropout), ("is_enhanced", is_enhanced)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {value!r} is not a boolean; accepted: True, False")
    if is_enhanced:
        raise ValueError("is_enhanced: True is not available in this release; accepted: False")
    os.environ["PYTHONHASHSEED"] = str(seed)
    os.environ.update(_ENVIRONMENT)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    accelerator = getattr(torch, "npu", None)
    if accelerator is not None:
        accelerator.manual_seed_all(seed)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if mode:
        torch.use_deterministic_algorithms(True)
    if rm_dropout:
        for name in _DROPOUTS:
            if hasattr(functional, name):
                setattr(functional, name, _without_dropout(getattr(functional, name)))


def _without_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(original, "__msprobe_no_dropout__", False):
        return original

    def dropout(input: Any, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:  # noqa: A002  (torch's own name)
        return original(input, 0.0, *args, **kwargs)

    dropout.__msprobe_no_dropout__ = True  # type: ignore[attr-defined]
    return dropout
