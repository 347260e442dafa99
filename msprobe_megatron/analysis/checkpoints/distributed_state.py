"""State of the distributed optimizer in a legacy checkpoint (`distrib_optim.pt`): flat buffers, taken apart by weight.

A buffer holds the weights of one model chunk in reverse order, each begun at a multiple of 64 elements of its bucket;
padding between buckets is left out, so that the next bucket begins anywhere. Where that is, only the job knows; but the
buffer of the master weights tells: the weights of the same rank, rounded, have to lie in it one after another. What
does not fit to the last element is not believed. Megatron before 0.7 keeps buckets apart, with their padding.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from msprobe_megatron.analysis.checkpoints.canonical import KINDS
from msprobe_megatron.analysis.checkpoints.optimizer_state import Named, State

_ALIGNED = 64
_PROBED = 256
"""Elements of a weight, at both of its ends, that say whether it lies in a place."""
_NOT_TRAINED = re.compile(r"(expert_bias|local_tokens_per_expert|inv_freq)$")


class Buffer(NamedTuple):
    """Name in the file, dtype of the weights, tensors by kind, and where buckets begin if the file says so."""

    name: str
    dtype: torch.dtype | None
    tensors: dict[str, torch.Tensor]
    buckets: tuple[int, ...] = ()


def states_in_buffers(content: Any, chunks: Sequence[dict[str, torch.Tensor]]) -> tuple[list[State], list[Buffer]]:
    """State tensors with the weights they belong to, and the buffers that could not be taken apart."""
    found: list[State] = []
    odd: list[Buffer] = []
    taken: set[tuple[int, str]] = set()
    for buffer in _buffers(content):
        for weights in _candidates(chunks, buffer.dtype, taken):
            starts = places_of([weight for _, _, weight in weights], buffer.tensors["param"], buffer.buckets)
            if starts is not None:
                taken.update((chunk, name) for chunk, name, _ in weights)
                found += _cut(weights, starts, buffer.tensors)
                break
        else:
            odd.append(buffer)
    return found, odd


def _buffers(content: Any) -> Iterator[Buffer]:
    """Those of all optimizers of a chain; one that another rank has saved is None."""
    several = isinstance(content, list | tuple)
    for number, one in enumerate(content if several else [content]):
        if not isinstance(one, dict):
            continue
        for index, by_dtype in one.items():
            for dtype, tensors in by_dtype.items() if isinstance(by_dtype, dict) else ():
                if isinstance(tensors, dict) and "param" in tensors:
                    name = f"{number}.{index}.{dtype}" if several else f"{index}.{dtype}"
                    own = dtype[0] if isinstance(dtype, tuple) and dtype else dtype
                    yield _buffer(name, own if isinstance(own, torch.dtype) else None, tensors)


def _buffer(name: str, dtype: torch.dtype | None, tensors: dict[str, Any]) -> Buffer:
    buckets: tuple[int, ...] = ()
    if isinstance(tensors["param"], list):
        sizes = [part.numel() for part in tensors["param"]]
        buckets = tuple(itertools.accumulate(sizes, initial=0))[:-1]
        tensors = {kind: torch.cat(parts) for kind, parts in tensors.items() if isinstance(parts, list)}
    shape = tensors["param"].shape
    return Buffer(
        name, dtype, {k: v for k, v in tensors.items() if isinstance(v, torch.Tensor) and v.shape == shape}, buckets
    )


def _candidates(
    chunks: Sequence[dict[str, torch.Tensor]], dtype: torch.dtype | None, taken: set[tuple[int, str]]
) -> Iterator[list[Named]]:
    """Weights that may fill a buffer: of one chunk, of one dtype, those of experts apart from the others."""
    for number, chunk in enumerate(chunks):
        fit = [
            (number, name, weight)
            for name, weight in reversed(chunk.items())
            if (dtype is None or weight.dtype is dtype)
            and (number, name) not in taken
            and not _NOT_TRAINED.search(name)
        ]
        dense = [item for item in fit if ".experts." not in item[1]]
        expert = [item for item in fit if ".experts." in item[1]]
        yield from (part for part in (dense, expert) if part)
        if dense and expert:
            yield fit


def places_of(weights: Sequence[torch.Tensor], flat: torch.Tensor, buckets: Sequence[int] = ()) -> list[int] | None:
    """Where each weight begins in a buffer of master weights; None if they do not fill it one after another.

    ``buckets`` says where buckets begin in a buffer that has their padding too.

    Example::

        >>> places_of([torch.tensor([3.0]), torch.tensor([1.0, 2.0])], torch.tensor([3.0, *[0.0] * 63, 1.0, 2.0]))
        [0, 64]
    """
    # Choices that are open: how many weights are placed, where the last one ends, where its bucket began, and starts.
    starts: list[int] = []
    waiting = [(0, 0, 0, -1)]
    while waiting:
        count, end, base, start = waiting.pop()
        if start >= 0:
            del starts[count - 1 :]
            starts.append(start)
        if count == len(weights):
            if end == flat.numel() or buckets:
                return starts
            continue
        weight = weights[count].reshape(-1)
        aligned = base + -(-(end - base) // _ALIGNED) * _ALIGNED
        begun = next((place for place in buckets if place >= end), flat.numel()) if buckets else end
        for place, bucket in ((begun, begun), (aligned, base)) if aligned != begun else ((aligned, base),):
            after = place + weight.numel()
            if after <= flat.numel() and _lies(weight, flat[place:after]):
                waiting.append((count + 1, after, bucket, place))
    return None


def _lies(weight: torch.Tensor, master: torch.Tensor) -> bool:
    ends = (slice(None, _PROBED), slice(-_PROBED, None))
    return all(torch.equal(master[end].to(weight.dtype), weight[end]) for end in ends)


def _cut(weights: list[Named], starts: list[int], tensors: dict[str, torch.Tensor]) -> Iterator[State]:
    for (chunk, name, weight), start in zip(weights, starts, strict=True):
        for kind, flat in tensors.items():
            yield KINDS.get(kind, kind), chunk, name, flat[start : start + weight.numel()].view(weight.shape)
