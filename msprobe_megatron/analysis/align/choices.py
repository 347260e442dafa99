"""Choices of a router of another implementation, token by token, as the kit records those of Megatron's routers.

`compare` tells by them a wrong router from one token that rounding sent elsewhere. The two words per token are those of
`job.measure.routing`: a code of the set of chosen experts, and the margin of the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_MASK = (1 << 30) - 1
_TINY = np.float32(1e-30)


def choice_words(
    logits: Floats, chosen: npt.NDArray[Any], bias: Floats | None, settings: Mapping[str, Any]
) -> npt.NDArray[np.int32]:
    """Two words for every token; `settings` are those of the other implementation."""
    x = logits.reshape(-1, logits.shape[-1]).astype(np.float32)
    experts = x.shape[-1]
    picked = np.zeros(x.shape, bool)
    np.put_along_axis(picked, chosen.reshape(len(x), -1).astype(np.int64), True, 1)
    sigmoid = str(settings.get("scoring_func") or ("sigmoid" if bias is not None else "softmax")) == "sigmoid"
    likely = (1 / (1 + np.exp(-x))).astype(np.float32)
    scores = likely if sigmoid else x
    if bias is not None:
        scores = scores + bias
    eligible, between = _groups(scores, settings)
    last = np.where(picked, scores, np.inf).min(-1)
    following = np.where(picked | ~eligible, -np.inf, scores).max(-1)
    margin = np.abs(last - following)
    if between is not None:
        margin = np.minimum(margin, between)
    size = np.sqrt((x * x).mean(-1))
    if sigmoid:
        size = size / 4 + likely.max(-1)
    relative = np.nan_to_num(margin / np.maximum(size, _TINY), posinf=np.finfo(np.float32).max).astype(np.float32)
    coarse = ((np.ascontiguousarray(x).view(np.int32) & 0xFFFF) == 0).all(-1)
    code = ((picked * _codes(experts)).sum(-1) & _MASK) * 2 + coarse
    return np.stack((code.astype(np.int32), relative.view(np.int32)), -1)


def _codes(experts: int) -> npt.NDArray[np.int64]:
    code = np.arange(1, experts + 1, dtype=np.int64)
    for factor in (0x45D9F3B, 0x2C1B3C6D):
        code = ((code ^ (code >> 15)) * factor) & _MASK
    return np.asarray(code ^ (code >> 13))


def _groups(scores: Floats, settings: Mapping[str, Any]) -> tuple[npt.NDArray[np.bool_], Floats | None]:
    """Experts in the groups that take part, and the margin between the last group that does and the next."""
    groups, taken = int(settings.get("n_group") or 0), int(settings.get("topk_group") or 0)
    if not 0 < taken < groups:
        return np.ones(scores.shape, bool), None
    summed = max(int(settings.get("num_experts_per_tok") or 1) // taken, 1)
    grouped = scores.reshape(len(scores), groups, -1)
    of_group = np.sort(grouped, -1)[..., -summed:].sum(-1)
    order = np.argsort(-of_group, -1)
    best = np.take_along_axis(of_group, order, 1)
    allowed = np.zeros(of_group.shape, bool)
    np.put_along_axis(allowed, order[:, :taken], True, 1)
    wide = np.broadcast_to(allowed[..., None], grouped.shape).reshape(scores.shape)
    return wide, ((best[:, taken - 1] - best[:, taken]) / summed).astype(np.float32)
