"""How far a result is from the exact one, held against what a healthy operator of its class may be off.

The exact result is the same call in 64 bits on a few rows. The answer of the exact operator to a change of its inputs
in their 24th bit says how much an operator that works in 32 bits may lose on these very inputs: a norm of numbers that
are nearly equal may lose much, one of ordinary numbers may not. What is more than that, plus the rounding of the result
itself, is the operator's own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from msprobe_megatron.measure import exact as exact_rows
from msprobe_megatron.probes.perturb.classes import TABLE, allowed
from msprobe_megatron.probes.perturb.noise import signs_of

NAMES = tuple(f"ref_{name}" for name in exact_rows.NAMES)
COUNT = len(NAMES)
WORKING = 2.0**-23
# A backward works with what its forward has rounded, and takes differences of it.
_BACKWARD = 4.0


def nudge(x: torch.Tensor, by: float = WORKING) -> torch.Tensor:
    """A 64-bit tensor with each element changed by a part of itself, up or down as a hash of its place says.

    Example::

        nudge(torch.ones(3, dtype=torch.float64), 0.5)
    """
    if x.dtype is not torch.float64 or x.numel() == 0:
        return x
    size = x.shape[-1] if x.dim() else 1
    factor = _FACTORS.get((size, by, x.device))
    if factor is None:
        factor = _FACTORS[size, by, x.device] = 1.0 + by * _turns(size, x.device)
    return x * factor


def inner(api: str, args: tuple[Any, ...], nudged: torch.Tensor) -> torch.Tensor:
    """The answer to nudged inputs, and to a nudge of what is computed on the way, where that is far larger.

    A gelu is x times (1 + erf), which for a negative x is the difference of two numbers near 1: what is rounded there
    comes out times x, however small the result.

    Example::

        inner("torch.nn.functional.gelu", (x,), nudged)
    """
    x = args[0] if args else None
    if "gelu" in api and isinstance(x, torch.Tensor) and x.shape == nudged.shape and x.is_floating_point():
        return nudged + WORKING * x.to(device=nudged.device, dtype=nudged.dtype)
    return nudged


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
        signs = np.repeat(signs_of(0, 0, -(-size // 2)), 2)[:size] * (1 - 2 * (np.arange(size) % 2))
        found = _TURNS[size, device] = torch.from_numpy(signs).to(device=device, dtype=torch.float64)
    return found


_TURNS: dict[tuple[int, Any], torch.Tensor] = {}
_FACTORS: dict[tuple[int, float, Any], torch.Tensor] = {}


def judge_rows(
    live: torch.Tensor,
    exact: torch.Tensor,
    nudged: torch.Tensor,
    kind: str,
    terms: int,
    out: torch.Tensor,
    by: float = WORKING,
    *,
    scrambled: torch.Tensor | None = None,
) -> None:
    """Put the figures of a part of a live result, the exact one and that of nudged inputs into ``out``.

    ``by`` is the part by which inputs were nudged. ``ref_over`` is the largest error in units of what is allowed: above
    1 the operator is wrong. ``ref_ulp`` is that error in units of the last place, ``ref_kappa`` the condition number of
    the exact operator. Elements are measured against their row. A row of a gradient may cancel to nothing, so those are
    measured against all rows, and against the row that the same gradient with its signs ``scrambled`` would give.

    Example::

        judge_rows(y, exact, nudged, "softmax", 64, out)
    """
    ulps, working = allowed(kind, live.dtype, terms)
    # Additions in the working precision, one after another, lose with the root of their number.
    summed = WORKING * math.sqrt(max(terms, 1)) if TABLE[kind].sums else 0.0
    limits = exact_rows.Limits(ulps * (1.0 if scrambled is None else _BACKWARD), working, summed)
    exact_rows.compare(live.detach(), exact, nudged, limits, out, scrambled)
    out[5] /= by
