"""What makes the choice of a router decidable afterwards: eight bytes per token.

The first word identifies the set of chosen experts, whatever their order; its lowest bit says that all scores of the
token fit into bfloat16. The second is the margin, float32: the distance between the last expert that was chosen and the
next one that was not, as a share of what the scores of the token are made of. A token with a small margin can go to
another expert by rounding; one with a large margin cannot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

WORDS = 2
_MASK = (1 << 30) - 1
_TINY = 1e-30


class Ranking(NamedTuple):
    """How a router ranks experts: by `function` of the logits, plus a bias, within the best groups of experts.

    `function` is `logits` (softmax after the choice, or the same order), `softmax` (before the choice) or `sigmoid`.
    `rounding` is the rounding of the scores as a share of that of the router's input: 1 if both have the same dtype.
    """

    function: str = "logits"
    bias: torch.Tensor | None = None
    groups: int = 0
    chosen_groups: int = 0
    topk: int = 1
    rounding: float = 1.0


def expert_codes(experts: int, device: torch.device) -> torch.Tensor:
    """A number of 30 bits for every expert; the sum over a set identifies it. Computed on the device: no copy."""
    code = torch.arange(1, experts + 1, device=device, dtype=torch.int64)
    for factor in (0x45D9F3B, 0x2C1B3C6D):
        code = ((code ^ (code >> 15)) * factor) & _MASK
    return code ^ (code >> 13)


def routing_record(logits: torch.Tensor, chosen: torch.Tensor, ranking: Ranking, codes: torch.Tensor) -> torch.Tensor:
    """The words of every token, int32 [tokens, 2]; `chosen` is a map [tokens, experts], or indices [tokens, k]."""
    experts = logits.shape[-1]
    x = logits.reshape(-1, experts).float()
    picked = _as_map(chosen, len(x), experts)
    scores = x
    if ranking.function == "sigmoid":
        scores = torch.sigmoid(x).to(logits.dtype).float()
    if ranking.bias is not None:
        scores = scores + ranking.bias.float()
    eligible, between_groups = _groups(scores, ranking)
    last = scores.masked_fill(~picked, torch.inf).amin(-1)
    following = scores.masked_fill(picked | ~eligible, -torch.inf).amax(-1)
    margin = (last - following).abs()
    if between_groups is not None:
        margin = torch.minimum(margin, between_groups)
    size = x.square().mean(-1).sqrt()
    if ranking.function == "sigmoid":  # its slope is a quarter at most
        size = size / 4 + ranking.rounding * torch.sigmoid(x).amax(-1)
    elif ranking.function == "softmax":  # rounding of a probability moves its logarithm by as much
        size = size + ranking.rounding
    relative = (margin / size.clamp_min(_TINY)).nan_to_num(posinf=torch.finfo(torch.float32).max)
    coarse = ((x.contiguous().view(torch.int32) & 0xFFFF) == 0).all(-1)
    code = ((picked * codes).sum(-1) & _MASK) * 2 + coarse
    return torch.stack((code.to(torch.int32), relative.contiguous().view(torch.int32)), -1)


def _as_map(chosen: torch.Tensor, tokens: int, experts: int) -> torch.Tensor:
    chosen = chosen.reshape(tokens, -1)
    if chosen.dtype is torch.bool or chosen.shape[-1] == experts:
        return chosen != 0
    return torch.zeros((tokens, experts), dtype=torch.bool, device=chosen.device).scatter_(1, chosen.long(), True)


def _groups(scores: torch.Tensor, ranking: Ranking) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Experts in the groups that take part, and the margin between the last group that does and the next."""
    if not ranking.chosen_groups or not 0 < ranking.chosen_groups < ranking.groups:
        return torch.ones_like(scores, dtype=torch.bool), None
    summed = max(ranking.topk // ranking.chosen_groups, 1)
    grouped = scores.reshape(len(scores), ranking.groups, -1)
    of_group = grouped.topk(summed, dim=-1)[0].sum(-1)
    best, index = of_group.topk(ranking.chosen_groups + 1, dim=-1)
    taken = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, index[:, :-1], True)
    return taken.unsqueeze(-1).expand_as(grouped).reshape_as(scores), (best[:, -2] - best[:, -1]) / summed
