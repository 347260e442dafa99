"""The error of a whole module on a few rows, in units of the last place of its output.

A module that works as its settings declare rounds its output once or twice, so each element is within a unit or two of
the exact one, whatever happens inside. Three things tell another computation:

- an element is further off than that, plus what the working precision may lose on these inputs (``slack``);
- a whole row is off by one factor: a sum, a variance or a reciprocal was rounded to the precision of the output, which
  no element shows alone. The factor is compared with the one that independent roundings of the elements would give;
- the output follows another formula (``rival``) more closely than its own: the tanh form of a GELU is nearer to the
  exact one than 16 bits resolve, except on many elements together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_TINY = 1e-300
# An output that is rounded less than this beside the common factor consists of few distinct values, whose errors agree.
_INDEPENDENT = 0.15
_FIT = 0.5
_SIGMAS = 8.0


class ModuleRows(NamedTuple):
    """Rows of a live output beside the exact ones, both (rows, elements), and what a healthy module may be off."""

    live: torch.Tensor
    exact: torch.Tensor
    unit: torch.Tensor
    """One unit in the last place, at each element, of the dtype that the settings declare."""
    ulps: float
    slack: torch.Tensor
    """What the working precision may lose beyond the rounding of the output."""
    roundings: int = 0
    """How often a healthy module rounds an element to the dtype of its output; 0: no test of common factors."""
    repeats: torch.Tensor | None = None
    """How often the input of each element occurs in its row: equal inputs are rounded alike, in the same direction."""
    rival: torch.Tensor | None = None
    """What another formula gives."""


def unit_of(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One unit in the last place of numbers of 64 bits, if they were of this dtype.

    Example::

        >>> unit_of(torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64), torch.bfloat16).tolist()[:2]
        [0.0078125, 0.015625]
    """
    info = torch.finfo(dtype)
    return info.eps * torch.exp2(torch.floor(torch.log2(size.abs().clamp(min=info.smallest_normal))))


def repeats_of(x: torch.Tensor) -> torch.Tensor:
    """How often each element occurs in its row.

    Example::

        >>> repeats_of(torch.tensor([[5.0, 7.0, 5.0]])).tolist()
        [[2.0, 1.0, 2.0]]
    """
    x = x.float()
    ordered = x.sort(dim=-1).values
    first, behind = torch.searchsorted(ordered, x), torch.searchsorted(ordered, x, right=True)
    return (behind - first).clamp(min=1).double()


def compare_module(candidates: list[ModuleRows], out: torch.Tensor) -> None:
    """Put the statistics of the best of the candidates into the seven places of ``out`` (`measure.exact.NAMES`)."""
    lines = torch.stack([_statistics(rows) for rows in candidates])
    best = torch.nan_to_num(lines[:, 3], nan=math.inf).argmin()
    out.copy_(lines.index_select(0, best.reshape(1))[0])


def _statistics(rows: ModuleRows) -> torch.Tensor:
    live, exact = rows.live.double(), rows.exact
    largest = torch.finfo(rows.live.dtype).max
    finite = torch.isfinite(live) & (exact.abs() <= largest)
    error = torch.where(finite, live - exact, 0.0)
    over = error.abs() / (rows.ulps * rows.unit + rows.slack + _TINY)
    worst = over.reshape(-1).max(dim=0)
    total = worst.values
    if rows.roundings:
        total = torch.maximum(total, _common_factor(rows, error))
    if rows.rival is not None:
        total = torch.maximum(total, _follows_rival(rows, rows.rival, error))
    return torch.stack(
        [
            torch.full_like(total, rows.live.numel()),
            (live.isnan() != exact.isnan()).sum().double(),
            (torch.isinf(live) & (exact.abs() < largest / 2)).sum().double(),
            total,
            (error.abs() / rows.unit).max(),
            torch.full_like(total, math.nan),
            worst.indices.double(),
        ]
    )


def _common_factor(rows: ModuleRows, error: torch.Tensor) -> torch.Tensor:
    """How far rows are off by one factor each, over what roundings of single elements explain."""
    exact = torch.nan_to_num(rows.exact)
    noise = rows.unit.square() * (rows.roundings / 12.0)
    noise = (noise if rows.repeats is None else noise * rows.repeats) + rows.slack.square()
    scale = exact.square().sum(-1)
    product = (error * exact).sum(-1)
    z = product.square() / ((noise * exact.square()).sum(-1) + _TINY)
    rest = error - exact * (product / (scale + _TINY)).unsqueeze(-1)
    independent = (rest / rows.unit).square().mean(-1) > _INDEPENDENT**2
    # Tokens that occur twice have the same errors twice: they count as one.
    mark = exact.sum(-1), exact.abs().sum(-1)
    same = (mark[0].unsqueeze(0) == mark[0].unsqueeze(1)) & (mark[1].unsqueeze(0) == mark[1].unsqueeze(1))
    weight = independent.double() / same.sum(-1)
    count = weight.sum().clamp(min=1.0)
    limit = 1.0 + 10.0 * torch.sqrt(2.0 / count)
    return torch.sqrt((z * weight).sum() / count / limit)


def _follows_rival(rows: ModuleRows, rival: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """How much of the difference between the two formulas the output shows; above 1: half of it, beyond noise."""
    apart = rival - rows.exact
    weight = 1.0 / (rows.unit.square() * (max(rows.roundings, 1) / 12.0) + rows.slack.square() + _TINY)
    size = (weight * apart.square()).sum()
    share = (weight * error * apart).sum() / (size + _TINY)
    noise = _SIGMAS / torch.sqrt(size + _TINY)
    return share / torch.clamp(noise, min=_FIT)
