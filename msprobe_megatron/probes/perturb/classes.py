"""Classes of operators and how far a healthy one of each may be from the exact result.

An operator rounds its result once, to the dtype of its output, and works inside in float32 or better: so the error of a
healthy one is part of a unit in the last place, plus what its working precision does to its inputs, which grows with
the square root of the number of terms that it adds up. The table is in units of the last place at the magnitude of a
row, because the last digits of an element that is small beside its row mean nothing to what comes after.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import NamedTuple

import torch

HALF = (torch.bfloat16, torch.float16)


class Tolerance(NamedTuple):
    """``half`` and ``single``: units in the last place allowed for results of 16 and of 32 bits; ``working``: how many
    times the answer of the exact operator to a change of its inputs by 2**-23; ``kappa``: the largest condition number
    that is not called fragile. ``sums``: whether the last two grow with the square root of the number of terms.
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
    # Several operators one after another, each rounding what it hands on.
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
    """The bare name of a call.

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
    """Units in the last place, and multiples of the exact operator's answer, that a healthy operator may be off.

    Example::

        >>> allowed("gemm", torch.bfloat16, 256)
        (1.0, 64.0)
    """
    row = TABLE[kind]
    ulps = row.half if dtype in HALF else row.single
    return ulps, row.working * (math.sqrt(max(terms, 1)) if row.sums else 1.0)


def fragile_above(kind: str, terms: int) -> float:
    """The condition number above which an operator is called fragile.

    Example::

        >>> fragile_above("gemm", 64)
        64.0
    """
    row = TABLE[kind]
    return row.kappa * (math.sqrt(max(terms, 1)) if row.sums else 1.0)
