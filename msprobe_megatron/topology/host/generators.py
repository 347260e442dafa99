"""Digests of Megatron's random generators: which must agree over tensor parallel ranks, and which must not.

Dropout outside of tensor parallel regions draws the same on all of their ranks; inside, each rank draws its own.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any, NamedTuple

import torch

_OWN = "model-parallel-rng"
_COMMON = "data-parallel-rng"


class Generators(NamedTuple):
    """64-bit digests of states by name."""

    common: dict[str, int]
    own: dict[str, int]


def generators(device: torch.device) -> Generators:
    """The generators of this rank, as far as Megatron keeps a tracker of them.

    Example::

        generators(torch.device("cuda")).own      # {"model-parallel-rng": 1234…}
    """
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    if module is None:
        return Generators({}, {})
    states: dict[str, Any] = module.get_cuda_rng_tracker().get_states()
    common = {_COMMON: digest(states[_COMMON])} if _COMMON in states else {}
    # The host's own generator also serves data loaders, which not every rank has.
    if device.type != "cpu" and hasattr(torch, device.type):
        common["default"] = digest(getattr(torch, device.type).get_rng_state())
    return Generators(common, {_OWN: digest(states[_OWN])} if _OWN in states else {})


def digest(state: Any) -> int:
    """64 bits of a state, which is a tensor of bytes on the host or a generator.

    Example::

        digest(torch.get_rng_state())
    """
    tensor = state.get_state() if isinstance(state, torch.Generator) else state
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
