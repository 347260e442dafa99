"""Operator classes, the error that a healthy operator of each may have, and the error of a result in these units.

An operator rounds its result once, to the dtype of its output, and works internally in float32 or better. So the error
of a healthy one is part of a unit in the last place (ulp), plus what its working precision does to its inputs, which
grows with the square root of the number of terms it adds up. The table is in ulps at the magnitude of a row, because
the last digits of an element that is small beside its row do not matter downstream.

The exact result is the same call in 64 bits on a few rows. How the exact operator responds to a change of its inputs in
their 24th bit shows how much an operator that works in 32 bits may lose on these very inputs: a norm of nearly equal
numbers may lose much, one of ordinary numbers may not. Errors beyond that, plus the rounding of the result itself, are
the operator's own.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from msprobe_megatron.job.features.perturb.run.changed_inputs import signs_of
from msprobe_megatron.job.measure import exact as exact_rows
from msprobe_megatron.job.measure.tables import on_device

HALF = (torch.bfloat16, torch.float16)


class Tolerance(NamedTuple):
    """Limits of one operator class.

    ``half``, ``single``: ulps allowed for 16-bit and 32-bit results. ``working``: allowed multiples of the exact
    operator's response to a change of its inputs by 2**-23. ``kappa``: condition numbers above are fragile.
    ``sums``: whether the last two grow with the square root of the number of terms.
    """

    half: float
    single: float
    working: float
    kappa: float
    sums: bool


# One rounding is half a unit; a unit leaves room for hardware that truncates. Transcendental functions in 32 bits are
# a few units off on every device; the tails of gelu and silu are measured against their row.
TABLE = {
    "elementwise": Tolerance(1.0, 8.0, 4.0, 64.0, sums=False),
    "reduction": Tolerance(1.0, 4.0, 4.0, 8.0, sums=True),
    "gemm": Tolerance(1.0, 4.0, 4.0, 8.0, sums=True),
    "softmax": Tolerance(1.0, 8.0, 4.0, 256.0, sums=False),
    "norm": Tolerance(1.0, 8.0, 4.0, 64.0, sums=True),
    "other": Tolerance(2.0, 16.0, 16.0, 256.0, sums=True),
    # Several operators in sequence, each rounding its result.
    "module": Tolerance(8.0, 32.0, 16.0, 1024.0, sums=True),
}

_BY_NAME = (
    ("softmax", re.compile(r"softmax|attention")),
    ("norm", re.compile(r"(layer|rms|group|batch|instance|l2)_?norm|normalize")),
    ("gemm", re.compile(r"matmul|linear|conv|einsum|(^|_)(b?mm|addmm|baddbmm|addbmm|mv|addmv|dot|inner|tensordot)$")),
    (
        "elementwise",
        re.compile(
            r"gelu|silu|relu|glu|swish|tanh|sigmoid|softplus|mish|erf|clamp|where|masked_fill|addcmul|addcdiv|lerp"
            r"|^r?(add|sub|mul|div|truediv|pow)$|^(neg|exp|expm1|exp2|log|log2|log1p|sqrt|rsqrt|square|reciprocal|abs"
            r"|sin|cos|maximum|minimum|multiply|divide|subtract|true_divide|float_power|hypot|negative|absolute)$"
        ),
    ),
    ("reduction", re.compile(r"sum|mean|norm|var$|std$|prod|loss|cross_entropy|(^|_)(a?max|a?min)$")),
)


@cache
def short_name(api: str) -> str:
    """Name of an API without its path and underscores.

    Example::

        >>> short_name("torch.Tensor.__rsub__"), short_name("torch.nn.functional.gelu"), short_name("my.op.default")
        ('rsub', 'gelu', 'op')
    """
    parts = api.split(".")
    ours = parts[0] == "torch" or len(parts) < 2
    return parts[-1].strip("_") if ours or "<locals>" in api or len(parts) > 3 else parts[1]


@cache
def class_of(api: str) -> str:
    """Class of an operator by its name.

    Example::

        >>> class_of("torch.nn.functional.softmax"), class_of("torch.Tensor.matmul"), class_of("torch.topk")
        ('softmax', 'gemm', 'other')
    """
    name = short_name(api)
    return next((kind for kind, pattern in _BY_NAME if pattern.search(name)), "other")


def allowed(kind: str, dtype: torch.dtype, terms: int) -> tuple[float, float]:
    """Ulps, and multiples of the exact operator's response, that a healthy operator may be off.

    Example::

        >>> allowed("gemm", torch.bfloat16, 256)
        (1.0, 64.0)
    """
    row = TABLE[kind]
    ulps = row.half if dtype in HALF else row.single
    return ulps, row.working * (math.sqrt(max(terms, 1)) if row.sums else 1.0)


def fragile_above(kind: str, terms: int) -> float:
    """The condition number above which an operator is fragile.

    Example::

        >>> fragile_above("gemm", 64)
        64.0
    """
    row = TABLE[kind]
    return row.kappa * (math.sqrt(max(terms, 1)) if row.sums else 1.0)


REFERENCE_NAMES = tuple(f"ref_{name}" for name in exact_rows.NAMES)
_KAPPA = exact_rows.NAMES.index("kappa")
WORKING = 2.0**-23
# A backward works on rounded results of its forward, and takes differences of them.
_BACKWARD = 4.0


def nudge(x: torch.Tensor, by: float = WORKING) -> torch.Tensor:
    """A 64-bit tensor with each element changed by a fraction of itself, up or down by a hash of its index.

    Example::

        >>> nudge(torch.ones(3, dtype=torch.float64), 0.5)
        tensor([0.5000, 1.5000, 0.5000], dtype=torch.float64)
    """
    if x.dtype is not torch.float64 or x.numel() == 0:
        return x
    size = x.shape[-1] if x.dim() else 1
    factor = _FACTORS.get((size, by, x.device))
    if factor is None:
        factor = _FACTORS[size, by, x.device] = 1.0 + by * _signs(size, x.device)
    return x * factor


def add_inner_rounding(api: str, args: tuple[Any, ...], nudged: torch.Tensor) -> torch.Tensor:
    """The response to nudged inputs, plus that to rounding inside the operator where it is far larger.

    A gelu is x times (1 + erf), which for a negative x is the difference of two numbers near 1: the rounding of that
    difference is multiplied by x, however small the result.
    """
    x = args[0] if args else None
    if "gelu" in api and isinstance(x, torch.Tensor) and x.shape == nudged.shape and x.is_floating_point():
        return nudged + WORKING * x.to(device=nudged.device, dtype=nudged.dtype)
    return nudged


def scramble(x: torch.Tensor) -> torch.Tensor:
    """A 64-bit tensor with the signs of its elements changed by a hash of their index.

    Example::

        >>> scramble(torch.ones(3, dtype=torch.float64))
        tensor([-1.,  1., -1.], dtype=torch.float64)
    """
    return x * _signs(x.shape[-1] if x.dim() else 1, x.device)


def _signs(size: int, device: torch.device) -> torch.Tensor:
    found = _SIGNS.get((size, device))
    if found is None:
        # Neighbours always differ, so that a row of which a mask leaves two elements is changed too.
        signs = np.repeat(signs_of(0, 0, -(-size // 2)), 2)[:size] * (1 - 2 * (np.arange(size) % 2))
        found = _SIGNS[size, device] = on_device(torch.from_numpy(signs), device, torch.float64)
    return found


_SIGNS: dict[tuple[int, Any], torch.Tensor] = {}
_FACTORS: dict[tuple[int, float, Any], torch.Tensor] = {}


def compare_rows(
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
    """Compare part of a live result with the exact one and with that of nudged inputs; statistics go into ``out``.

    ``by`` is the fraction by which inputs were nudged. ``ref_over`` is the largest error in units of what is allowed:
    above 1 the operator is wrong. ``ref_ulp`` is that error in ulps, ``ref_kappa`` the condition number of the exact
    operator. Elements are measured against their row. A row of a gradient may cancel to nothing, so gradients are
    measured against all rows, and against the row that the gradient has with its signs ``scrambled``.
    """
    ulps, working = allowed(kind, live.dtype, terms)
    # Sequential additions in the working precision lose with the square root of their number.
    summed = WORKING * math.sqrt(max(terms, 1)) if TABLE[kind].sums else 0.0
    limits = exact_rows.Limits(ulps * (1.0 if scrambled is None else _BACKWARD), working, summed)
    exact_rows.compare(live.detach(), exact, nudged, limits, out, scrambled)
    out[_KAPPA] /= by
