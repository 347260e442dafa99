"""Site: gradients of weights, before and after they are reduced, and of single microbatches.

Megatron keeps them in contiguous buckets, which are read in place: one pass per bucket, one segment per parameter.
Without buckets they are the `.grad` of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from msprobe_megatron.job.patching.patch_set import PatchSet, declared
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.module.hooks import HookedSite
from msprobe_megatron.job.sites.sink import Reading, SeriesSink
from msprobe_megatron.topology import names
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.shards import Place, ShardSpec
from msprobe_megatron.topology.shards_of.dtensors import local_part
from msprobe_megatron.topology.shards_of.grad_buffers import BucketSegments, Segment, buckets
from msprobe_megatron.topology.shards_of.parameters import parameter_spec

Fault = Callable[[BaseException, str], None]
Part = tuple[int, int] | None


class WatchedParameters:
    """The selected parameters of all chunks, and the places of tensors that belong to them."""

    def __init__(self, chunks: Sequence[nn.Module], sink: SeriesSink, where: Coordinates) -> None:
        self._where = where
        self.entries = [
            (index, chunk, entry)
            for index, chunk in enumerate(chunks)
            for entry in names.parameters(chunk)
            if sink.wants_parameter(entry.name)
        ]
        self._by_id = {id(entry.parameter): (index, entry) for index, _, entry in self.entries}

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._by_id

    def place(self, parameter: nn.Parameter, kind: str, io: str, path: str = "", part: Part = None) -> Place:
        """The place of a tensor that is laid out like the parameter, or like ``part`` of it when flattened."""
        chunk, entry = self._by_id[id(parameter)]
        spec = parameter_spec(entry)
        if part is not None and spec.unknown is None:
            spec = replace(spec, flat=part)
        if kind == "grad_unreduced":
            # Of this rank's own samples and tokens: before the reduction, ranks hold partial sums and not replicas.
            spec = replace(spec, partial=(*spec.partial, "dp", "cp"))
        shape = tuple(local_part(parameter).shape)

        def spec_of(shape: tuple[int, ...]) -> ShardSpec:
            return spec

        op = type(entry.owner.module).__name__
        return Place(kind, entry.name, io, path, op, chunk, -1, spec_of, self._where.size, local_shape=shape)


class GradientSite(HookedSite):
    """Gradients of the watched parameters."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        watched: WatchedParameters,
        sink: SeriesSink,
        fault: Fault,
        *,
        microbatches: bool = False,
    ) -> None:
        super().__init__()
        self._sink, self._fault, self._watched = sink, fault, watched
        self._unreduced: dict[int, tuple[Any, Reading, list[torch.Tensor]]] = {}
        self._reduced: list[tuple[Reading, list[torch.Tensor]]] = []
        in_buckets: set[int] = set()
        for chunk in chunks:
            for found in buckets(chunk):
                some = [segment for segment in found.segments if segment.parameter in watched]
                in_buckets.update(id(segment.parameter) for segment in found.segments)
                if some:
                    self._add_bucket(found, some)
        self._others = [entry.parameter for _, _, entry in watched.entries if id(entry.parameter) not in in_buckets]
        self._other_places = [watched.place(p, "grad_reduced", "weight") for p in self._others]
        self._other_reading = Reading(self._other_places, "optimizer")
        self._patches = PatchSet(declared("gradients") if self._unreduced else [], self)
        self._microbatches = microbatches
        self._counts: dict[int, int] = {}

    def _add_bucket(self, found: BucketSegments, segments: list[Segment]) -> None:
        data, watched = found.bucket.grad_data, self._watched
        if found.shared:
            # On a single data-parallel rank there is no reduction, hence no gradient before it.
            places = [watched.place(s.parameter, "grad_unreduced", "weight") for s in segments]
            views = [data[s.start : s.stop].view(local_part(s.parameter).shape) for s in segments]
            self._unreduced[id(found.bucket)] = (found.bucket, Reading(places, "backward"), views)
        places, views = [], []
        for s in segments:
            if s.part is None:
                views.append(data[s.start : s.stop].view(local_part(s.parameter).shape))
            elif s.part[0] < s.part[1]:
                views.append(data[s.start + s.part[0] : s.start + s.part[1]])
            else:
                continue  # this rank owns nothing of it
            places.append(watched.place(s.parameter, "grad_reduced", "weight", part=s.part))
        if places:
            self._reduced.append((Reading(places, "optimizer"), views))

    def install(self) -> None:
        """Start to report buckets and microbatches; hooks that are still set are reused."""
        self._active = True
        self._counts.clear()
        self._patches.apply()
        if self._microbatches and not self._handles:
            for _, _, entry in self._watched.entries:
                if entry.parameter.requires_grad:
                    place = self._watched.place(entry.parameter, "grad_unreduced", "weight", "microbatch")
                    hook = self._microbatch(place)
                    self._handles.append(entry.parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove hooks and patches. Safe to call twice."""
        self._patches.revert()
        super().remove()

    def ledger(self) -> list[dict[str, Any]]:
        """State of the patches."""
        return self._patches.ledger()

    def before_reduction(self, some: Iterable[Any]) -> None:
        """These buckets are about to be reduced."""
        if not self._active:
            return
        try:
            with untraced():
                for bucket in some:
                    found = self._unreduced.get(id(bucket))
                    if found is not None:
                        self._sink.read(found[1], found[2])
        except Exception as error:
            self._fault(error, "gradients before reduction")

    def reduced(self) -> None:
        """The optimizer is about to step: read the gradients it gets."""
        for reading, views in self._reduced:
            self._sink.read(reading, views)
        tensors = [local_part(p.grad) if p.grad is not None else None for p in self._others]
        here = [position for position, tensor in enumerate(tensors) if tensor is not None]
        if not here:
            return
        if len(here) != len(self._other_reading.places):
            self._other_reading = Reading([self._other_places[position] for position in here], "optimizer")
        self._sink.read(self._other_reading, [tensor for tensor in tensors if tensor is not None])

    def _microbatch(self, place: Place) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if not self._active:
                return
            try:
                # Every schedule runs the backwards of a chunk in microbatch order.
                number = self._counts.get(id(place), 0)
                self._counts[id(place)] = number + 1
                with untraced():
                    self._sink.see(place, local_part(gradient), number, "backward")
            except Exception as error:
                self._fault(error, f"gradient of {place.name}")

        return hook
