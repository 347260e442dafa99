"""Decoded values of optimizer states that are stored in another format.

TransformerEngine's FusedAdam, which Megatron's precision-aware optimizer uses, stores moments and master weights in 16
or 8 bits with a scale, or only the low 16 bits of a master weight whose high bits are the weight itself. Used by
`sites.training.optimizer_states`; nothing here modifies state or synchronizes with the device.
"""

from __future__ import annotations

from typing import Any

import torch

from msprobe_megatron.topology.shards_of.dtensors import local_part
from msprobe_megatron.topology.shards_of.optimizers import Owned

MASTER = "master_param"
"""Name of the state that holds an optimizer's own master weight."""
_PLAIN = (torch.float32, torch.float64, torch.bfloat16)


def is_encoded(entry: Owned, name: str) -> bool:
    """Whether a state is stored in an encoded format."""
    if not hasattr(entry.optimizer, "get_unscaled_state"):
        return False
    stored = entry.state().get(name)
    if not isinstance(stored, torch.Tensor):
        return False
    stored = local_part(stored)
    # bfloat16 has the range of float32 and needs no scale; an 8-bit tensor subclass reports dtype float32.
    return stored.dtype not in _PLAIN or type(stored) not in (torch.Tensor, torch.nn.Parameter)


def state_value(entry: Owned, name: str) -> torch.Tensor:
    """The decoded values of a state, in the shape of ``entry.main``; a new tensor if they are stored encoded."""
    stored: Any = entry.state()[name]
    if not is_encoded(entry, name):
        return local_part(stored).detach()
    if name == MASTER and stored.dtype is torch.int16:
        return _joined(local_part(entry.main), local_part(stored))
    found: torch.Tensor = entry.optimizer.get_unscaled_state(entry.main, name)
    return local_part(found).detach()


def weight_value(entry: Owned) -> torch.Tensor:
    """The weight that an optimizer step updates, in full precision: the master weight, or else ``entry.main``."""
    if MASTER in entry.state():
        return state_value(entry, MASTER)
    return local_part(entry.main).detach()


def has_master(entry: Owned) -> bool:
    """Whether the optimizer keeps a second copy of the weight in higher precision."""
    return entry.separate or MASTER in entry.state()


def _joined(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """float32 from a bfloat16 and its low 16 bits, which are negative where the bfloat16 was rounded up."""
    high = weight.detach().view(torch.int16).to(torch.int32) << 16
    return high.add_(low).view(torch.float32)
