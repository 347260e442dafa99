"""Site: the losses that the training script's loss function reports for a microbatch."""

from __future__ import annotations

from typing import Any

import torch

from msprobe_megatron.job.sites.sink import TensorSink
from msprobe_megatron.topology.shards import Place, ShardSpec


class LossSite:
    """Reads the entries that a schedule's `forward_step` appends to its data store."""

    def __init__(self, sink: TensorSink) -> None:
        self._sink = sink
        self._places: dict[tuple[str, str, int], Place] = {}

    def report(self, entry: Any, microbatch: int, vpp: int) -> None:
        """Report every tensor in the last entry of the store; the elements of a short vector one by one."""
        if not isinstance(entry, dict):
            return
        for name, value in entry.items():
            values = value if isinstance(value, tuple | list) else [value]
            for index, item in enumerate(values):
                if not isinstance(item, torch.Tensor):
                    continue
                # Megatron reports [sum of losses, number of tokens]: two quantities, never one statistic.
                parts = item.reshape(-1).unbind() if item.dim() and item.numel() <= 4 else (item,)
                for position, part in enumerate(parts):
                    path = str(index + position) if len(values) > 1 or len(parts) > 1 else ""
                    self._sink.see(self._place(str(name), path, vpp), part, microbatch, "forward")

    def _place(self, name: str, path: str, vpp: int) -> Place:
        key = (name, path, vpp)
        if key not in self._places:
            spec = ShardSpec.unmergeable("reduced by the training script's own rule")
            self._places[key] = Place("loss", name, "output", path, "loss_func", vpp, -1, lambda shape: spec, _one)
        return self._places[key]


def _one(axis: str) -> int:
    return 1
