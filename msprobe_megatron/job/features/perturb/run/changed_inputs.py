"""Changed inputs for the second run of a call: another precision, the host, or noise.

Precision: a 16-bit result is compared with 32 bits where all of it is computed (fix, `profile: msprobe`), and every
result with 64 bits where a few rows are. Noise: in units of the last place, and msprobe's four changes. The sign of the
noise of an element comes from a hash of its index in the whole tensor, dimension by dimension, so a shard gets the same
noise as that part of the whole tensor, in every layout. No random generator is used. Zeros, subnormal numbers, Inf and
NaN are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call

from msprobe_megatron.job.measure.pair import digits

_NESTING = 4
Change = Callable[[torch.Tensor], torch.Tensor]


def convert(value: Any, change: Change, depth: int = 0) -> Any:  # noqa: PLR0911 (one for each container)
    """The same nested containers with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if depth == _NESTING:
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(convert(item, change, depth + 1) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(convert(item, change, depth + 1) for item in value)
    if isinstance(value, dict):
        return {key: convert(item, change, depth + 1) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = {
            item.name: convert(getattr(value, item.name), change, depth + 1) for item in fields(value) if item.init
        }
        return replace(value, **changed)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in the order of `convert`."""
    found: list[torch.Tensor] = []
    convert(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def higher(dtype: torch.dtype) -> torch.dtype:
    """The next precision above a floating-point type; float64 stays."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def raised(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the next precision, differentiably."""
    return x.to(higher(x.dtype)) if x.is_floating_point() and x.dtype is not torch.float64 else x


def single(x: torch.Tensor) -> torch.Tensor:
    """16 bits in 32, as msprobe does; other tensors as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def double(x: torch.Tensor) -> torch.Tensor:
    """A floating-point tensor in 64 bits; others as they are."""
    return x.double() if x.is_floating_point() else x


def on_host(x: torch.Tensor) -> torch.Tensor:
    """A tensor in host memory, 16 bits in 32."""
    return single(x.to("cpu"))


def has_lower(value: Any) -> bool:
    """Whether any tensor of the arguments has 16 bits.

    Example::

        >>> has_lower((torch.ones(1, dtype=torch.bfloat16),))
        True
    """
    return any(x.dtype in (torch.float16, torch.bfloat16) for x in tensors_of(value))


def convert_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> tuple[tuple[Any, ...], Any]:
    """Changed arguments; a dtype that the call names for its result (`softmax(x, dtype=…)`) changes too."""

    def other(value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return change(torch.empty(0, dtype=value)).dtype
        return value

    changed, keywords = convert(args, change), convert(kwargs, change)
    return tuple(map(other, changed)), {key: other(value) for key, value in keywords.items()}


def module_twin(module: nn.Module, change: Change) -> Callable[..., Any]:
    """A function that runs a module with its parameters and buffers changed."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def run(*args: Any, **kwargs: Any) -> Any:
        return functional_call(module, {key: change(value) for key, value in state.items()}, args, kwargs)

    return run


def find_sibling(name: str, modules: dict[str, nn.Module], layer: int | None) -> str | None:
    """Name of the module of the same class at the same place in the nearest other layer; None if there is none."""
    if layer is None:
        return None
    head, _, tail = name.partition(f"layers.{layer}")
    others: Sequence[int] = sorted(range(10_000), key=lambda n: (abs(n - layer), n))[1:200]
    for other in others:
        candidate = f"{head}layers.{other}{tail}"
        if candidate in modules and type(modules[candidate]) is type(modules[name]):
            return candidate
    return None


Numbering = tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]
Runs = tuple[tuple[int, int], ...]
_INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
# msprobe's strengths, by dtype.
STRENGTH = {torch.bfloat16: 1e-4, torch.float16: 1e-6, torch.float32: 1e-8, torch.float64: 1e-16}
_MIX = 0x9E3779B97F4A7C15
_ALL = (1 << 64) - 1
_TABLE = 1 << 16
_QUOTIENTS = 64
"""Signs of quotients are those of a dimension that no tensor has."""
_PIECE = 1 << 19
"""Elements changed at once: the temporary memory that noise needs besides its result."""


def signs_of(dim: int, first: int, count: int) -> npt.NDArray[np.int64]:
    """Sign factors of ``count`` indices from ``first`` on along a dimension.

    Example::

        >>> signs_of(0, 0, 6)
        array([-1, -1,  1, -1,  1,  1])
    """
    index = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    word = index * np.uint64(_MIX) + np.uint64((dim + 1) * 0xD1B54A32D192ED03 & _ALL)
    word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    found: npt.NDArray[np.int64] = 2 * (word >> np.uint64(63)).astype(np.int64) - 1
    return found


@lru_cache(maxsize=64)
def _table(dim: int, numbers: Runs, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Signs along a dimension whose local elements are runs (first, count) of the whole, all below ``_TABLE``."""
    values = np.concatenate([signs_of(dim, first, count) for first, count in numbers])
    return torch.from_numpy(values).to(device=device, dtype=dtype)


def _signs(dim: int, numbers: Runs, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`_table` for any runs: beyond it, the sign of an index is that of its remainder times that of its quotient.

    So a dimension as long as the flat gradient buffer needs no table of its length.
    """
    if max(first + count for first, count in numbers) <= _TABLE:
        return _table(dim, numbers, dtype, device)
    index = torch.cat([torch.arange(first, first + count, device=device) for first, count in numbers])
    signs = _table(dim, ((0, _TABLE),), dtype, device)[index % _TABLE]
    quotients = _table(dim + _QUOTIENTS, ((0, _TABLE),), dtype, device)
    # Divided by the sign of quotient 0, so that indices below the table's length have the signs of the table.
    return signs * quotients[index.div_(_TABLE, rounding_mode="floor").remainder_(_TABLE)] * quotients[0]


def _cut(numbers: Runs, first: int, count: int) -> Runs:
    """The runs of ``count`` local elements from ``first`` on."""
    found, at = [], 0
    for start, length in numbers:
        low, high = max(first - at, 0), min(first + count - at, length)
        if low < high:
            found.append((start + low, high - low))
        at += length
    return tuple(found)


def add_ulps(x: torch.Tensor, ulps: int, numbering: Numbering | None = None) -> torch.Tensor | None:
    """``x`` with every element moved by ``ulps`` units in its last place, up or down.

    ``numbering`` says which elements of the whole tensor these are (`topology.index_map`); None: all of it.

    Example::

        >>> add_ulps(torch.tensor([1.0, 0.0]), 1)
        tensor([1.0000, 0.0000])
    """
    integer = _INTEGERS.get(x.dtype)
    if integer is None or x.numel() == 0:
        return None
    x = x.detach()
    if x.dim() == 0:
        return _step(x, ulps, [_signs(0, ((0, 1),), integer, x.device)[0]])
    runs = [_runs(x, dim, numbering) for dim in range(x.dim())]

    def sign(dim: int, some: Runs) -> torch.Tensor:
        return _signs(dim, some, integer, x.device).view([-1 if d == dim else 1 for d in range(x.dim())])

    counts = [dim for dim in range(x.dim()) if x.size(dim) > 1 or numbering is not None]
    if x.numel() <= _PIECE:
        return _step(x, ulps, [sign(dim, runs[dim]) for dim in counts])
    # In pieces: the tensor may be as large as all gradients of the job.
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wide = max(range(x.dim()), key=x.size)
    others = [sign(dim, runs[dim]) for dim in counts if dim != wide]
    short = sign(wide, runs[wide]) if x.size(wide) <= _TABLE else None
    rows = max(1, _PIECE * x.size(wide) // x.numel())
    for first in range(0, x.size(wide), rows):
        count = min(rows, x.size(wide) - first)
        own = sign(wide, _cut(runs[wide], first, count)) if short is None else short.narrow(wide, first, count)
        y.narrow(wide, first, count).copy_(_step(x.narrow(wide, first, count), ulps, [*others, own]))
    return y


def _step(x: torch.Tensor, ulps: int, signs: list[torch.Tensor]) -> torch.Tensor:
    integer = _INTEGERS[x.dtype]
    bits, _ = digits(x.dtype)
    width = torch.iinfo(integer).bits
    words = x.contiguous().view(integer)
    magnitude = words & torch.iinfo(integer).max
    smallest = 1 << bits  # the bit pattern of the smallest normal number
    largest = (((1 << (width - 1 - bits)) - 1) << bits) - 1  # of the largest finite one
    step = ((magnitude >= smallest + ulps) & (magnitude <= largest - ulps)).to(integer)
    del magnitude
    step *= ulps
    for sign in signs:
        step *= sign
    step += words
    return step.view(x.dtype)


def _runs(x: torch.Tensor, dim: int, numbering: Numbering | None) -> Runs:
    if numbering is None or len(numbering) != x.dim():
        return ((0, x.size(dim)),)
    step, segments = numbering[dim]
    return tuple((offset // max(step, 1), count) for _, count, offset in segments)


def add_noise(x: torch.Tensor) -> torch.Tensor | None:
    """Msprobe's noise: a constant, added where the magnitude is above its square root.

    Example::

        >>> add_noise(torch.tensor([1e-5, 1.0], dtype=torch.float64)) is None
        False
    """
    strength = STRENGTH.get(x.dtype)
    if strength is None or x.numel() == 0:
        return None
    y = x.detach().clone()
    for piece in torch.split(_flat(y), _PIECE):
        piece.copy_(torch.where(piece.abs() > strength**0.5, piece + strength, piece))
    return y


def flip_last_bit(x: torch.Tensor) -> torch.Tensor | None:
    """Msprobe's bit noise: the last bit of the mantissa flipped, where the number is normal.

    Example::

        >>> flip_last_bit(torch.tensor([1.0]))
        tensor([1.0000])
    """
    integer = _INTEGERS.get(x.dtype)
    if integer is None or x.numel() == 0:
        return None
    y = x.detach().clone()
    for piece in torch.split(_flat(y), _PIECE):
        normal = (piece.abs() > torch.finfo(x.dtype).smallest_normal).to(integer)
        piece.view(integer).bitwise_xor_(normal)
    return y


def _flat(y: torch.Tensor) -> torch.Tensor:
    """The elements of a copy in memory order; a copy has no gaps."""
    return y.as_strided((y.numel(),), (1,))


def swap_ends(x: torch.Tensor) -> torch.Tensor | None:
    """Msprobe's change of value: first and last element of the first two dimensions swapped.

    Example::

        >>> swap_ends(torch.tensor([1.0, 2.0, 3.0]))
        tensor([3., 2., 1.])
    """
    if x.dim() == 0 or x.numel() == 0:
        return None
    if x.dim() == 1 and x.numel() < 2:
        return None
    if x.dim() > 1 and x.size(0) < 2 and x.size(1) < 2:
        return None
    y = x.detach().clone()
    if x.dim() == 1:
        y[0], y[-1] = x[-1], x[0]
    else:
        y[0, 0], y[-1, -1] = x[-1, -1], x[0, 0]
    return y


def swap_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """First and last row along a dimension swapped; its own inverse.

    Example::

        >>> swap_rows(torch.tensor([1.0, 2.0, 3.0]), 0)
        tensor([3., 2., 1.])
    """
    y = x.clone()
    y.select(dim, 0).copy_(x.select(dim, -1))
    y.select(dim, -1).copy_(x.select(dim, 0))
    return y
