"""The interface that sites report to; the probes of the features implement it.

`TensorSink` takes single tensors, `Sink` also selects, `SeriesSink` takes what a monitor reads at every step: many
tensors at once, digests, plain numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from msprobe_megatron.job.measure.many import Many
from msprobe_megatron.topology.shards import Place


class TensorSink(Protocol):
    """Takes one tensor at a time."""

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Record a tensor now: it may be freed or overwritten after the call."""


class Sink(TensorSink, Protocol):
    """Takes tensors and selects which ones."""

    def wants(self, name: str) -> bool:
        """Whether the module, API call, collective, parameter or variable of this name is selected."""

    def wants_io(self, direction: str, io: str) -> bool:
        """Whether inputs or outputs (`io`) of forward or backward (`direction`) are selected."""


class Reading:
    """Tensors that are always measured together, at one point of the step."""

    def __init__(self, places: Sequence[Place], phase: str) -> None:
        self.places, self.phase = list(places), phase
        self.many: Many | None = None


class SeriesSink(TensorSink, Protocol):
    """Takes what a monitor reads at every step."""

    def wants_parameter(self, name: str) -> bool:
        """Whether the parameter of this name is selected."""

    def read(self, reading: Reading, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Record many tensors now; returns their slots."""

    def ratio(self, place: Place, above: int, below: int) -> None:
        """Record the norm of one slot over that of another."""

    def see_digest(self, place: Place, tensor: torch.Tensor, microbatch: int | None) -> None:
        """Record a tensor and the digest of its elements now."""

    def value(self, place: Place, number: float, microbatch: int | None = None) -> int:
        """Record a number."""
