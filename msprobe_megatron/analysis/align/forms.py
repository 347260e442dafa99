"""Tensors of another implementation in the form that Megatron gives them: index arithmetic, and sums on statistics.

A form takes the source tensors of a rule in their order and returns the target. Weights are rearranged along their
first dimension, activations along their last. Elements are moved and never computed with, so that any dtype is handled
by its words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]


@dataclass(frozen=True)
class Sizes:
    """What forms need to know of the model, from the configuration of the other side."""

    heads: int = 1
    groups: int = 1
    experts: int = 0
    samples: int = 1


def qkv(parts: Sequence[Words], sizes: Sizes, axis: int) -> Words:
    """Queries, keys and values as Megatron interleaves them: of every group its queries, its key, its value."""
    q, k, v = (np.moveaxis(part, axis, 0) for part in parts)
    rest = q.shape[1:]
    groups = sizes.groups
    cut = [part.reshape(groups, -1, *rest) for part in (q, k, v)]
    return np.moveaxis(np.concatenate(cut, 1).reshape(-1, *rest), 0, axis)


def qkv_blocks(parts: Sequence[Words], sizes: Sizes, axis: int) -> Words:
    """The same from one tensor that holds all queries, then all keys, then all values."""
    (whole,) = parts
    width = whole.shape[axis] // (sizes.heads + 2 * sizes.groups)
    cuts = [sizes.heads * width, (sizes.heads + sizes.groups) * width]
    return qkv(np.split(whole, cuts, axis), sizes, axis)


def joined(parts: Sequence[Words], sizes: Sizes, axis: int) -> Words:
    """One after another: gate and up projections."""
    return np.concatenate(list(parts), axis)


def same(parts: Sequence[Words], sizes: Sizes, axis: int) -> Words:
    """As it is."""
    return parts[0]


def swapped(parts: Sequence[Words], sizes: Sizes, axis: int) -> Words:
    """Up before gate, put in Megatron's order."""
    return np.concatenate(list(reversed(np.split(parts[0], 2, axis))), axis)


def every_other(parts: Sequence[Words], sizes: Sizes, axis: int) -> Words:
    """Gate and up in alternating columns (GPT-OSS), put one after another."""
    whole = np.moveaxis(parts[0], axis, 0)
    return np.moveaxis(np.concatenate((whole[::2], whole[1::2])), 0, axis)


def transposed(parts: Sequence[Words], sizes: Sizes, axis: int) -> Words:
    """Stored as (inputs, outputs)."""
    return np.ascontiguousarray(parts[0].T)


def transposed_every_other(parts: Sequence[Words], sizes: Sizes, axis: int) -> Words:
    """Stored as (inputs, outputs), gate and up in alternating columns."""
    return every_other([transposed(parts, sizes, axis)], sizes, axis)


FORMS: dict[str, Callable[[Sequence[Words], Sizes, int], Words]] = {
    "same": same,
    "qkv": qkv,
    "qkv_blocks": qkv_blocks,
    "joined": joined,
    "swapped": swapped,
    "every_other": every_other,
    "transposed": transposed,
    "transposed_every_other": transposed_every_other,
    "plus_one": same,
    "dense": same,
    "routing": same,
}
"""By the names that maps use. `plus_one` (norms that add 1 to their weight), `dense` (chosen experts as a table of
tokens and experts) and `routing` (logits and chosen experts as choices with margins) compute: see `translate`."""


def sequence_first(x: Words) -> Words:
    """(batch, sequence, …) as (sequence, batch, …)."""
    return np.ascontiguousarray(np.swapaxes(x, 0, 1)) if x.ndim >= 2 else x


def dense_choice(scores: Words, chosen: Words, sizes: Sizes) -> Words:
    """Scores of the chosen experts as a table with a column for every expert, 0 for those not chosen.

    Tokens come batch first and leave sequence first.
    """
    scores, chosen = (x.reshape(-1, x.shape[-1]) for x in (scores, chosen))
    table = np.zeros((len(scores), sizes.experts), scores.dtype)
    np.put_along_axis(table, chosen.astype(np.int64), scores, 1)
    return sequence_first(table.reshape(sizes.samples, -1, sizes.experts)).reshape(table.shape)
