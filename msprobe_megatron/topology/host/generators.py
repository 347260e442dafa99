"""Digests of Megatron's random generators: those that tensor parallel ranks must share, and those they must not.

Outside of tensor parallel regions, dropout draws the same numbers on all ranks; inside, every rank draws different
ones.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any, NamedTuple

import torch

_OWN = "model-parallel-rng"
_COMMON = "data-parallel-rng"


class Generators(NamedTuple):
    """64-bit digests of generator states by name: those that ranks share, and those of this rank only."""

    common: dict[str, int]
    own: dict[str, int]


def generators(device: torch.device) -> Generators:
    """The generators of this rank; empty without Megatron's tracker."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    if module is None:
        return Generators({}, {})
    states: dict[str, Any] = module.get_cuda_rng_tracker().get_states()
    common = {_COMMON: digest(states[_COMMON])} if _COMMON in states else {}
    # The CPU generator is left out: it also serves data loaders, which not every rank has.
    if device.type != "cpu" and hasattr(torch, device.type):
        common["default"] = digest(getattr(torch, device.type).get_rng_state())
    return Generators(common, {_OWN: digest(states[_OWN])} if _OWN in states else {})


def digest(state: Any) -> int:
    """64-bit digest of a state, which is a byte tensor on the host or a generator."""
    tensor = state.get_state() if isinstance(state, torch.Generator) else state
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
