"""Site: what the optimizer is about to use: parameters and their reduced gradients.

Read on entry to the outermost `optimizer.step()`: every parameter has been gathered and used by then, and every
gradient has been reduced, whatever overlaps what. With the distributed optimizer a rank holds the reduced
gradient of its own range only; the range comes from Megatron's own buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from msprobe_megatron.topology import names
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.dtensors import local_part
from msprobe_megatron.topology.grad_buffers import reduced_range
from msprobe_megatron.topology.parameters import parameter_spec
from msprobe_megatron.topology.places import Place
from msprobe_megatron.topology.shards import ShardSpec


class Sink(Protocol):
    """Who is told of a parameter or a gradient."""

    def wants(self, name: str) -> bool:
        """Whether a parameter of this name is to be watched."""

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Take note of a tensor, now."""


class OptimizerSite:
    """Parameters and gradients of all chunks, and the loss scale.

    Example::

        site = OptimizerSite(chunks, optimizer, probe, coordinates)
        site.collect()          # before optimizer.step()
    """

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, sink: Sink, where: Coordinates) -> None:
        self._sink, self._where, self._optimizer = sink, where, optimizer
        self._parameters: list[tuple[nn.Module, nn.Parameter, Place, Place]] = []
        for index, chunk in enumerate(chunks):
            for entry in names.parameters(chunk):
                if sink.wants(entry.name):
                    weight = self._place("parameter", entry, index, _whole(entry))
                    gradient = self._place("grad_reduced", entry, index, _reduced(entry, chunk))
                    self._parameters.append((chunk, entry.parameter, weight, gradient))
        self._ranges: dict[int, tuple[int, int] | None] = {}
        self._scale = Place(
            "loss", "loss_scale", "value", "", "optimizer", 0, -1, lambda shape: ShardSpec(), where.size
        )

    def __len__(self) -> int:
        return len(self._parameters)

    def collect(self) -> None:
        """Tell the sink of every parameter and gradient."""
        see, ranges = self._sink.see, self._ranges
        for chunk, parameter, weight, gradient in self._parameters:
            # Without a call where there is nothing to find out.
            see(weight, parameter if type(parameter) is nn.Parameter else local_part(parameter), None, "optimizer")
            value = _gradient(parameter)
            if value is None:
                continue
            if type(value) is not torch.Tensor:
                value = local_part(value)
            key = id(parameter)
            part = ranges[key] if key in ranges else self._range(chunk, parameter)
            if part is not None:
                value = value.reshape(-1)[part[0] : part[1]]
                if part[0] == part[1]:
                    continue
            see(gradient, value, None, "optimizer")
        scale = _loss_scale(self._optimizer)
        if scale is not None:
            self._sink.see(self._scale, scale, None, "optimizer")

    def _range(self, chunk: nn.Module, parameter: nn.Parameter) -> tuple[int, int] | None:
        """What of the gradient this rank holds; Megatron lays its buffers out once."""
        found = self._ranges[id(parameter)] = reduced_range(chunk, parameter)
        return found

    def _place(
        self, kind: str, entry: names.NamedParameter, chunk: int, spec: Callable[[tuple[int, ...]], ShardSpec]
    ) -> Place:
        op = type(entry.owner.module).__name__
        shape = tuple(local_part(entry.parameter).shape)
        return Place(kind, entry.name, "weight", "", op, chunk, -1, spec, self._where.size, local_shape=shape)


def _whole(entry: names.NamedParameter) -> Callable[[tuple[int, ...]], ShardSpec]:
    spec = parameter_spec(entry)
    return lambda shape: spec


def _reduced(entry: names.NamedParameter, chunk: nn.Module) -> Callable[[tuple[int, ...]], ShardSpec]:
    spec = parameter_spec(entry)

    def with_range(shape: tuple[int, ...]) -> ShardSpec:
        part = reduced_range(chunk, entry.parameter)
        return spec if part is None or spec.unknown is not None else replace(spec, flat=part)

    return with_range


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Megatron accumulates into `main_grad`; plain torch into `grad`."""
    main: torch.Tensor | None = getattr(parameter, "main_grad", None)
    return main if main is not None else parameter.grad


def _loss_scale(optimizer: Any) -> torch.Tensor | None:
    getter = getattr(optimizer, "get_loss_scale", None)
    scale = getter() if getter is not None else None
    return scale if isinstance(scale, torch.Tensor) else None
