"""Site: parameters, their reduced gradients and buffers, as the optimizer is about to use them.

Read on entry to the outermost `optimizer.step()`: by then every parameter has been gathered and used and every gradient
has been reduced, whatever overlap is configured. With the distributed optimizer a rank holds the reduced gradient of
its own range only; the range comes from Megatron's own buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from msprobe_megatron.job.sites.sink import Sink
from msprobe_megatron.topology import names
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.shards import Place, ShardSpec
from msprobe_megatron.topology.shards_of.declared import declared_spec
from msprobe_megatron.topology.shards_of.dtensors import local_part
from msprobe_megatron.topology.shards_of.grad_buffers import reduced_range
from msprobe_megatron.topology.shards_of.parameters import parameter_spec


class OptimizerSite:
    """Parameters and gradients of all chunks, the loss scale, and the gradient norm."""

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, sink: Sink, where: Coordinates) -> None:
        self._sink, self._where, self._optimizer = sink, where, optimizer
        self._parameters: list[tuple[nn.Module, nn.Parameter, Place, Place]] = []
        for index, chunk in enumerate(chunks):
            for entry in names.parameters(chunk):
                if sink.wants(entry.name):
                    weight = self._place("parameter", entry, index, _whole(entry))
                    gradient = self._place("grad_reduced", entry, index, _reduced(entry, chunk))
                    self._parameters.append((chunk, entry.parameter, weight, gradient))
        self._buffers = [entry for index, chunk in enumerate(chunks) for entry in self._buffers_of(chunk, index)]
        self._ranges: dict[int, tuple[int, int] | None] = {}
        self._scale, self._norm = (
            Place("loss", name, "value", "", "optimizer", 0, -1, lambda shape: ShardSpec(), where.size)
            for name in ("loss_scale", "grad_norm")
        )

    def __len__(self) -> int:
        return len(self._parameters)

    def collect(self) -> None:
        """Report every parameter and gradient."""
        see, ranges = self._sink.see, self._ranges
        for chunk, parameter, weight, gradient in self._parameters:
            # A plain parameter needs no call.
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
        for module, attribute, place in self._buffers:
            buffer = getattr(module, attribute, None)
            if isinstance(buffer, torch.Tensor):
                see(place, buffer, None, "optimizer")
        scale = _loss_scale(self._optimizer)
        if scale is not None:
            self._sink.see(self._scale, scale, None, "optimizer")

    def collect_norm(self, result: Any) -> None:
        """Report the gradient norm that Megatron's optimizer returned beside its success; all ranks have the same."""
        norm = result[1] if isinstance(result, tuple) and len(result) > 1 else None
        if isinstance(norm, int | float) and not isinstance(norm, bool):
            norm = torch.tensor(norm, dtype=torch.float64, device="cpu")
        if isinstance(norm, torch.Tensor) and norm.numel() == 1:
            self._sink.see(self._norm, norm.detach().reshape(()), None, "optimizer")

    def _buffers_of(self, chunk: nn.Module, index: int) -> Iterator[tuple[nn.Module, str, Place]]:
        """Numbers that belong to the state of a module and that no gradient changes: the bias of a router."""
        model = names.unwrap(chunk)
        for entry in names.modules(chunk):
            for attribute, buffer in entry.module.named_buffers(recurse=False):
                name = attribute if entry.parent is None else f"{entry.name}.{attribute}"
                passing = attribute in entry.module._non_persistent_buffers_set or not buffer.is_floating_point()
                if passing or not self._sink.wants(name):
                    continue
                spec = declared_spec(buffer, model) or ShardSpec.unmergeable("a buffer of which no layout is declared")
                op, size = type(entry.module).__name__, self._where.size
                place = Place("buffer", name, "weight", "", op, index, -1, _always(spec), size)
                yield entry.module, attribute, place

    def _range(self, chunk: nn.Module, parameter: nn.Parameter) -> tuple[int, int] | None:
        """The range of the gradient that this rank holds; cached, because Megatron lays its buffers out once."""
        found = self._ranges[id(parameter)] = reduced_range(chunk, parameter)
        return found

    def _place(
        self, kind: str, entry: names.NamedParameter, chunk: int, spec: Callable[[tuple[int, ...]], ShardSpec]
    ) -> Place:
        op = type(entry.owner.module).__name__
        shape = tuple(local_part(entry.parameter).shape)
        return Place(kind, entry.name, "weight", "", op, chunk, -1, spec, self._where.size, local_shape=shape)


def _whole(entry: names.NamedParameter) -> Callable[[tuple[int, ...]], ShardSpec]:
    return _always(parameter_spec(entry))


def _always(spec: ShardSpec) -> Callable[[tuple[int, ...]], ShardSpec]:
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
