"""Site: the buffers of a model that belong to its state, such as the bias by which a router balances its experts.

They are no parameters, and a conversion can forget them. Recorded in forward-only passes, under `parameter`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from msprobe_megatron.job.sites.sink import Sink
from msprobe_megatron.topology import names
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.shards import Dim, Place, ShardSpec


class BufferSite:
    """Reports every floating-point buffer that a checkpoint would hold."""

    def __init__(self, chunks: Sequence[nn.Module], sink: Sink, where: Coordinates) -> None:
        self._sink = sink
        self._held: list[tuple[Place, nn.Module, str]] = []
        for index, chunk in enumerate(chunks):
            for entry in names.modules(chunk):
                prefix = "" if entry.parent is None else f"{entry.name}."
                for name in _persistent(entry.module):
                    if sink.wants(f"{prefix}{name}"):
                        op = type(entry.module).__name__
                        place = Place("parameter", f"{prefix}{name}", "weight", "", op, index, -1, _whole, where.size)
                        self._held.append((place, entry.module, name))

    def collect(self) -> None:
        """Report them as they are now."""
        for place, module, name in self._held:
            buffer = getattr(module, name, None)
            if isinstance(buffer, torch.Tensor):
                self._sink.see(place, buffer.detach(), None, "optimizer")


def _persistent(module: nn.Module) -> Iterator[str]:
    for name, buffer in module.named_buffers(recurse=False):
        if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
            yield name


def _whole(shape: tuple[int, ...]) -> ShardSpec:
    return ShardSpec(tuple(Dim(f"d{index}") for index in range(len(shape))))
