"""How far a result is from the exact one, held against what a healthy operator of its class may be off.

The exact result is the same call in 64 bits on a few rows. The answer of the exact operator to a change of its inputs
in their 24th bit says how much an operator that works in 32 bits may lose on these very inputs: a norm of numbers that
are nearly equal may lose much, one of ordinary numbers may not. What is more than that, plus the rounding of the result
itself, is the operator's own.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from msprobe_megatron.probes.perturb.classes import TABLE, allowed
from msprobe_megatron.probes.perturb.noise import sign_of

NAMES = ("ref_elements", "ref_nan_apart", "ref_inf_apart", "ref_over", "ref_ulp", "ref_kappa", "ref_where")
COUNT = len(NAMES)
WORKING = 2.0**-23
_TINY = 1e-300
# A backward works with what its forward has rounded, and takes differences of it.
_BACKWARD = 4.0


def nudge(x: torch.Tensor, by: float = WORKING) -> torch.Tensor:
    """A 64-bit tensor with each element changed by a part of itself, up or down as a hash of its place says.

    Example::

        nudge(torch.ones(3, dtype=torch.float64), 0.5)
    """
    if x.dtype is not torch.float64 or x.numel() == 0:
        return x
    return x * (1.0 + by * _turns(x.shape[-1] if x.dim() else 1, x.device))


def scramble(x: torch.Tensor) -> torch.Tensor:
    """A 64-bit tensor with the signs of its elements changed as a hash of their place says.

    Example::

        scramble(torch.ones(3, dtype=torch.float64))
    """
    return x * _turns(x.shape[-1] if x.dim() else 1, x.device)


def _turns(size: int, device: torch.device) -> torch.Tensor:
    found = _TURNS.get((size, device))
    if found is None:
        # Neighbours always differ, so that a row of which a mask leaves two elements is moved too.
        signs = [float(sign_of(0, i // 2)) * (1 - 2 * (i % 2)) for i in range(size)]
        found = _TURNS[size, device] = torch.tensor(signs, dtype=torch.float64, device=device)
    return found


_TURNS: dict[tuple[int, Any], torch.Tensor] = {}


def judge_rows(
    live: torch.Tensor,
    exact: torch.Tensor,
    answer: torch.Tensor,
    kind: str,
    terms: int,
    out: torch.Tensor,
    by: float = WORKING,
    *,
    scrambled: torch.Tensor | None = None,
) -> None:
    """Put the figures of a part of a live result, the exact one and its answer to a nudge into ``out``.

    ``by`` is the part by which inputs were nudged. ``ref_over`` is the largest error in units of what is allowed: above
    1 the operator is wrong. ``ref_ulp`` is that error in units of the last place, ``ref_kappa`` the condition number of
    the exact operator. Elements are measured against their row. A row of a gradient may cancel to nothing, so those are
    measured against all rows, and against the row that the same gradient with its signs ``scrambled`` would give.

    Example::

        judge_rows(y, exact, nudged - exact, "softmax", 64, out)
    """
    ulps, working = allowed(kind, live.dtype, terms)
    eps = torch.finfo(live.dtype).eps
    x, y = live.detach().double(), exact
    # The exact result in the dtype of the live one: what is Inf there is Inf in every honest result.
    rounded = exact.to(live.dtype).double()
    finite = torch.isfinite(x) & torch.isfinite(rounded)
    nan_apart = (x.isnan() != rounded.isnan()).sum()
    inf_apart = (torch.isinf(x) & torch.isfinite(y) & (y.abs() < torch.finfo(live.dtype).max / 2)).sum()
    error = torch.where(finite, (x - y).abs(), 0.0)
    size = torch.where(finite, y.abs(), 0.0)
    keep = size.dim() > 0
    row = (size * size).mean(dim=-1, keepdim=True).sqrt() if keep and scrambled is None else (size * size).mean().sqrt()
    if scrambled is not None:
        whole = scrambled.square().mean(dim=-1, keepdim=True).sqrt() if keep else scrambled.abs()
        row = torch.maximum(row, torch.nan_to_num(whole))
        ulps *= _BACKWARD
    moved = torch.where(torch.isfinite(answer), answer, 0.0)
    response = (moved * moved).mean(dim=-1, keepdim=True).sqrt() if keep else moved.abs()
    unit = eps * torch.maximum(size, row) + torch.finfo(live.dtype).smallest_normal * eps
    # Additions in the working precision, one after another, lose with the root of their number.
    summed = WORKING * math.sqrt(max(terms, 1)) * torch.maximum(size, row) if TABLE[kind].sums else 0.0
    over = error / (ulps * unit + working * response + summed + _TINY)
    worst = over.reshape(-1).max(dim=0)
    kappa = (moved.square().sum() / (size.square().sum() + _TINY)).sqrt() / by
    figures = torch.stack(
        [
            torch.full_like(kappa, live.numel()),
            nan_apart.double(),
            inf_apart.double(),
            worst.values,
            (error / unit).max(),
            kappa,
            worst.indices.double(),
        ]
    )
    out.copy_(figures)
