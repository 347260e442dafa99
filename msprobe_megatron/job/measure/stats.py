"""The statistics that every row of a run directory holds, and which tensors have them.

All merge by minimum, maximum or addition, so that shards, microbatches and ranks add up afterwards. Here they are
computed by torch for CPU tensors where the compiled kernel is missing; `operator` has the fast ways.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from msprobe_megatron.job.measure.aten import measure_on_host
from msprobe_megatron.job.measure.flatten import compact

FLOAT_COLUMNS = ("min", "max", "sum", "sumsq", "absmax")
COUNT_COLUMNS = ("n_nan", "n_posinf", "n_neginf", "n_zero")

_REAL_NAMES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
)
# Older torch lacks some of these; what it lacks no tensor can have.
REAL = frozenset(getattr(torch, name) for name in _REAL_NAMES if hasattr(torch, name))
"""The dtypes that are measured as they are."""
_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class Stats(NamedTuple):
    """The statistics of one tensor as Python numbers; ``min > max`` if no element is finite."""

    min: float
    max: float
    sum: float
    sumsq: float
    absmax: float
    n_nan: int
    n_posinf: int
    n_neginf: int
    n_zero: int


def measurable(x: torch.Tensor) -> bool:
    """Say whether ``x`` has statistics: strided, real or complex, with memory behind it.

    Not so: sparse and nested layouts, quantised dtypes, meta tensors, wrapper subclasses (fake, distributed
    and functional-transform tensors: the values are elsewhere) and tensors whose storage was freed.

    Example::

        >>> measurable(torch.empty(3, device="meta"))
        False
    """
    return readable(x) is not None


def measure_into(x: torch.Tensor, floats: torch.Tensor, counts: torch.Tensor) -> bool:
    """Write the statistics of a CPU tensor into ``floats`` (FLOAT_COLUMNS) and ``counts`` (COUNT_COLUMNS).

    ``min``, ``max``, ``sum``, ``sumsq`` and ``absmax`` are over the finite elements. Without any (or in an
    empty tensor) they are the neutral +inf, -inf, 0, 0, -inf. A complex tensor is measured as its real and
    imaginary parts, ``2 * numel`` real numbers. An expanded tensor is counted as large as it looks.

    Leaves ``x``, its version counter, its autograd graph and all random states alone. Returns False, with both
    untouched, when ``x`` is not ``measurable``.

    Example::

        >>> floats, counts = torch.empty(5, dtype=torch.float64), torch.empty(4, dtype=torch.int64)
        >>> measure_into(torch.tensor([-3.0, 0.0, float("inf")]), floats, counts)
        True
    """
    found = readable(x)
    if found is None:
        return False
    data, times = flattened(found)
    if data.numel() == 0:
        write_neutral(floats, counts)
    else:
        measure_on_host(data, times, floats, counts)
    return True


def flattened(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The real numbers of a tensor, in whatever order, and how often each stands in it; no part of any graph."""
    data = x.data  # as detach(), for less
    if data.dtype in _COMPLEX:
        data = torch.view_as_real(data.resolve_conj())
    if data.is_neg():
        data = data.resolve_neg()
    return (data, 1) if data.is_contiguous() else compact(data)


def measure(x: torch.Tensor) -> Stats:
    """Return the statistics of a CPU tensor as Python numbers.

    Raises ``ValueError`` when ``x`` is not ``measurable``.

    Example::

        >>> measure(torch.tensor([1.0, 2.0])).sumsq
        5.0
    """
    floats = torch.empty(5, dtype=torch.float64, device="cpu")
    counts = torch.empty(4, dtype=torch.int64, device="cpu")
    if not measure_into(x, floats, counts):
        raise ValueError(
            f"a {type(x).__name__} of {x.dtype}, {x.layout}, on {x.device} has no statistics; accepted: "
            "strided real, complex, integer or bool tensors with memory"
        )
    return Stats(*floats.tolist(), *counts.tolist())


def write_neutral(floats: torch.Tensor, counts: torch.Tensor) -> None:
    """Write the statistics of no elements."""
    # Slice by slice: a literal tensor would be a copy from the host, which may wait on some devices.
    floats.fill_(-torch.inf)
    floats[:1].fill_(torch.inf)
    floats[2:4].zero_()
    counts.zero_()


def readable(x: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor to read for the values of ``x``, or None when they are not to be had."""
    if type(x) not in _PLAIN_TYPES:
        # A subclass that only adds attributes holds its own values; one that dispatches or wraps may not.
        if type(x).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            x = x.as_subclass(torch.Tensor)
    dtype = x.dtype
    if x.layout is not torch.strided or x.is_meta or (dtype not in REAL and dtype not in _COMPLEX):
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return None
    # Reading a storage that was resized to nothing would be reading address zero.
    return x if x.untyped_storage().nbytes() or not x.numel() else None
