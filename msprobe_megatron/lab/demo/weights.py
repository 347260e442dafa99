"""Initial weights that do not depend on the layout.

Every parameter is drawn whole, in fp32, from a generator seeded by the job's seed and the parameter's
canonical name, and cut by its shard spec. Runs after the chunks are built and before DDP
and the optimizer copy them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from msprobe_megatron.topology import coordinates, names, shards
from msprobe_megatron.topology.shards_of import parameters

# Output layers of a residual block: Megatron scales them down by the depth.
_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True)
class Initial:
    """The distribution of the initial weights.

    Example::

        >>> Initial(seed=1, std=0.02, num_layers=2).whole("decoder.final_layernorm.weight", (3,)).tolist()
        [1.0, 1.0, 1.0]
    """

    seed: int
    std: float
    num_layers: int

    def whole(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Draw the global tensor of the parameter called `name`, fp32 on the host."""
        if _is_norm(name) and name.endswith("weight"):
            return torch.ones(*shape)
        values = torch.empty(*shape).normal_(generator=generator(self.seed, name))
        return values.mul_(self._deviation(name))

    def _deviation(self, name: str) -> float:
        if name.endswith("bias"):
            # Small, but not Megatron's zero: a bias of zeros would hide a bias that is cut or added wrongly.
            return self.std / 10
        if name.endswith(_OUTPUTS):
            return self.std / math.sqrt(2.0 * self.num_layers)
        return self.std


def _is_norm(name: str) -> bool:
    return "norm" in ".".join(name.split(".")[-2:])


def generator(seed: int, *key: object) -> torch.Generator:
    """Make a generator whose stream depends on `seed` and `key` only, on every machine and in every process.

    Example::

        >>> generator(1, "a").initial_seed() == generator(1, "a").initial_seed()
        True
    """
    text = "\0".join(map(str, (seed, *key))).encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
    return torch.Generator().manual_seed(number >> 1)


def fill(chunks: Sequence[nn.Module], initial: Initial) -> None:
    """Set every parameter of the chunks to this rank's part of its initial value."""
    here = coordinates.current()
    for chunk in chunks:
        for entry in names.parameters(chunk):
            spec = parameters.parameter_spec(entry)
            shape = spec.global_shape(tuple(entry.parameter.shape), here.size)
            if shape is None:
                raise ValueError(f"{entry.name}: cannot cut its initial value: {spec}")
            part = shards.cut(initial.whole(entry.name, shape), spec, here.of, here.size)
            with torch.no_grad():
                entry.parameter.copy_(part)
