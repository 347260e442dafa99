"""The core of attention, fused or not, held against float64 on a few queries of two heads.

What is examined is the whole way from queries, keys and values to the output: scale, mask, softmax, which group of keys
a head belongs to, and the average of the values. It costs the keys and values of two heads, and a few rows of scores.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from msprobe_megatron.job.features.perturb.judge.module_error import ModuleRows, unit_of
from msprobe_megatron.job.features.perturb.run.references import HALF, is_rows

_CLASSES = ("DotProductAttention", "TEDotProductAttention")
_QUERIES = 6
_MOST_KEYS = 1 << 21
"""Elements of keys that are copied for one head; longer sequences are left out."""
_FOUR = 4


class Taken(NamedTuple):
    """Some queries of two heads, with the keys and values that they attend to."""

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    places: list[tuple[int, int]]
    """Sample and head."""
    rows: list[int]
    shape: tuple[int, ...]
    masks: list[list[torch.Tensor | None]]
    """By candidate and head: which keys are hidden from each query."""


def scale_of(module: nn.Module) -> float | None:
    """By what scores are multiplied in all; None for an attention that is not examined."""
    config = getattr(module, "config", None)
    known = type(module).__name__ in _CLASSES and config is not None
    if not known or getattr(config, "window_size", None) is not None:
        return None
    if getattr(config, "softmax_type", "vanilla") != "vanilla" or getattr(config, "context_parallel_size", 1) > 1:
        return None
    scale = getattr(module, "softmax_scale", None)
    if scale is None:
        scale = getattr(getattr(module, "flash_attention", None), "softmax_scale", None)
    if not isinstance(scale, float):
        return None
    by_layer = getattr(
        config, "apply_query_key_layer_scaling", False
    )  # divided by before the softmax, multiplied in it
    return scale * float(getattr(module, "layer_number", 1)) if by_layer else scale


def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken | None:
    """Copies of what is needed; None where the inputs are not of the expected form."""
    names = ("query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = given.get("query"), given.get("key"), given.get("value")
    if any(given.get(name) is not None for name in names[5:]) or _drops(module):
        return None
    if not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor):
        return None
    if not all(is_rows(x) and x.dim() == _FOUR for x in (query, key, value)):
        return None
    length, batch, heads, width = query.shape
    groups = key.shape[2]
    same = key.shape[0] == length and key.shape[:3] == value.shape[:3] and key.shape[3] == width
    if not same or heads % groups or length * width > _MOST_KEYS:
        return None
    rows = sorted({round(i * (length - 1) / (_QUERIES - 1)) for i in range(_QUERIES)})
    places = [(0, min(1, heads - 1)), (batch - 1, heads // 2)]
    kind = given.get("attn_mask_type")
    kind = getattr(module, "attn_mask_type", None) if kind is None else kind
    masks = _masks(given.get("attention_mask"), str(getattr(kind, "name", "")), rows, places, tuple(query.shape))
    if not masks:
        return None
    return Taken(
        [torch.stack([query.detach()[row, sample, head] for row in rows]) for sample, head in places],
        [key.detach()[:, sample, head * groups // heads].clone() for sample, head in places],
        [value.detach()[:, sample, head * groups // heads].clone() for sample, head in places],
        places,
        rows,
        (length, batch, heads, value.shape[3]),
        masks,
    )


def _drops(module: nn.Module) -> bool:
    """Whether probabilities are set to zero at random."""
    config = getattr(module, "config", None)
    own = getattr(getattr(module, "attention_dropout", None), "p", None)
    rate = own if own is not None else getattr(config, "attention_dropout", 0.0)
    return module.training and bool(rate)


def _masks(
    mask: Any, kind: str, rows: list[int], places: list[tuple[int, int]], shape: tuple[int, ...]
) -> list[list[torch.Tensor | None]]:
    """What may be hidden: a fused attention makes its causal mask itself, others use the one that they are given."""
    length, batch = shape[0], shape[1]
    found: list[list[torch.Tensor | None]] = []
    if isinstance(mask, torch.Tensor):
        whole = mask.dtype is torch.bool and mask.dim() == _FOUR and tuple(mask.shape[2:]) == (length, length)
        if whole and mask.shape[0] in (1, batch) and mask.shape[1] == 1:
            picked = [mask.detach()[min(sample, mask.shape[0] - 1), 0] for sample, _ in places]
            found.append([torch.stack([part[row] for row in rows]) for part in picked])
    if "causal" in kind:
        device = mask.device if isinstance(mask, torch.Tensor) else None
        later = [torch.arange(length, device=device) > row for row in rows]
        found.append([torch.stack(later) for _ in places])
    elif kind == "no_mask" and mask is None:
        found.append([None for _ in places])
    return found


def compare(taken: Taken, output: Any, scale: float) -> tuple[torch.Tensor, list[ModuleRows]] | None:
    """The live output, and its rows beside what float64 gives, one candidate for each mask that may hold."""
    live = output[0] if isinstance(output, tuple) and output else output
    length, batch, heads, width = taken.shape
    if not is_rows(live) or live.numel() != math.prod(taken.shape) or tuple(live.shape[:2]) != (length, batch):
        return None
    cut = live.detach().view(length, batch, heads, width) if live.is_contiguous() else None
    if cut is None:
        return None
    part = torch.cat([torch.stack([cut[row, sample, head] for row in taken.rows]) for sample, head in taken.places])
    found = []
    for masks in taken.masks:
        exact, slack = zip(
            *(
                _reference(query, key, value, mask, scale)
                for query, key, value, mask in zip(taken.queries, taken.keys, taken.values, masks, strict=True)
            ),
            strict=True,
        )
        wanted = torch.cat(exact)
        found.append(ModuleRows(part, wanted, unit_of(wanted, live.dtype), 2.0, torch.cat(slack)))
    return live, found


def _reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Averages of the values, and what rounding of scores and of probabilities may change of them."""
    scores = query.double() @ key.double().t() * scale
    if mask is not None:
        scores = scores.masked_fill(mask.to(scores.device), -torch.inf)
    finite = torch.where(torch.isfinite(scores), scores.abs(), 0.0)
    weights = torch.nan_to_num(torch.softmax(scores, -1))
    sizes = weights @ value.double().abs()
    # Scores of 16 bits are off by half a unit each, probabilities by half a unit of theirs; sums are kept in 32 bits.
    epsilon = torch.finfo(query.dtype).eps if query.dtype in HALF else 2.0**-10
    largest = finite.amax(-1, keepdim=True)
    return weights @ value.double(), epsilon * (2.0 + 2.0 * largest) * sizes
