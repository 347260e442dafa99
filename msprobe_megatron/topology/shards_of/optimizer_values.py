"""The numbers that an optimizer's states stand for, where it keeps them in another form.

TransformerEngine's FusedAdam, which Megatron's precision-aware optimizer works with, keeps moments and master weights
in 16 or 8 bits with a factor, or only the low 16 bits of a master weight whose high bits are the weight itself.
Read by `sites.optimizer_states`; nothing here changes anything or makes the host wait.
"""

from __future__ import annotations

from typing import Any

import torch

from msprobe_megatron.topology.dtensors import local_part
from msprobe_megatron.topology.optimizers import Owned

MASTER = "master_param"
"""The state in which an optimizer keeps a master weight of its own."""
_PLAIN = (torch.float32, torch.float64, torch.bfloat16)


def is_encoded(entry: Owned, name: str) -> bool:
    """Whether the numbers of a state are not those that lie in its memory.

    Example::

        is_encoded(entry, "exp_avg")      # True with --exp-avg-dtype fp16
    """
    if not hasattr(entry.optimizer, "get_unscaled_state"):
        return False
    stored = entry.state().get(name)
    if not isinstance(stored, torch.Tensor):
        return False
    stored = local_part(stored)
    # bfloat16 has the range of float32 and needs no factor; a tensor of 8 bits calls itself one of float32.
    return stored.dtype not in _PLAIN or type(stored) not in (torch.Tensor, torch.nn.Parameter)


def state_value(entry: Owned, name: str) -> torch.Tensor:
    """The numbers of a state, as large as what the optimizer works on; a new tensor where they are kept encoded.

    Example::

        state_value(entry, "exp_avg").norm()
    """
    stored: Any = entry.state()[name]
    if not is_encoded(entry, name):
        return local_part(stored).detach()
    if name == MASTER and stored.dtype is torch.int16:
        return _joined(local_part(entry.main), local_part(stored))
    found: torch.Tensor = entry.optimizer.get_unscaled_state(entry.main, name)
    return local_part(found).detach()


def weight_value(entry: Owned) -> torch.Tensor:
    """What a step of the optimizer changes, as exactly as it keeps it: its master weight, or what it works on.

    Example::

        before = weight_value(entry).clone()
    """
    if MASTER in entry.state():
        return state_value(entry, MASTER)
    return local_part(entry.main).detach()


def has_master(entry: Owned) -> bool:
    """Whether the optimizer keeps the weight a second time, more exactly."""
    return entry.separate or MASTER in entry.state()


def _joined(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """A float32 of a bfloat16 and the 16 bits below, which are negative where the bfloat16 was rounded up."""
    high = weight.detach().view(torch.int16).to(torch.int32) << 16
    return high.add_(low).view(torch.float32)
