"""What a module should give, in 64 bits, from rows of its inputs, its weights and its settings.

Nothing of the module's own code runs. One function per kind of module; each returns the candidates that
`judge.module_error` compares the live output with, or None where the inputs are not of the expected form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from msprobe_megatron.job.features.perturb.judge.module_error import ModuleRows, repeats_of, unit_of
from msprobe_megatron.job.measure.tables import on_device

Function = Callable[[torch.Tensor], torch.Tensor]
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)
_WORKING = 2.0**-23
_MOST_ELEMENTS, _MOST_ROWS, _FEWEST_ROWS = 1 << 14, 64, 4
_TWICE = 2.05
"""Units that two roundings to nearest may be off, with room for a device that truncates one of them."""
_ONCE = 1.05


def is_rows(x: Any) -> bool:
    """Whether rows can be taken of it: a plain floating-point tensor with elements and a last dimension."""
    plain = isinstance(x, torch.Tensor) and type(x) in (torch.Tensor, nn.Parameter)
    return plain and x.dtype in FLOATS and x.dim() > 1 and x.numel() > 0


def count_rows(rows: int, width: int, work: int = 1) -> int:
    """How many of ``rows`` rows are examined, each of ``width`` elements that take ``work`` operations."""
    return min(rows, _MOST_ROWS, max(_FEWEST_ROWS, _MOST_ELEMENTS // max(width * work, 1)))


@lru_cache(maxsize=1024)
def coordinates(shape: tuple[int, ...], count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Indices of ``count`` places of this shape, one tensor per dimension, the first and the last place among them.

    Example::

        >>> coordinates((2, 3), 3, torch.device("cpu"))
        (tensor([0, 0, 1]), tensor([0, 2, 2]))
    """
    total = 1
    for size in shape:
        total *= size
    places = [round(i * (total - 1) / max(count - 1, 1)) for i in range(count)]
    found: list[torch.Tensor] = []
    for size in reversed(shape):
        found.insert(0, on_device(torch.tensor([place % size for place in places], dtype=torch.int64), device))
        places = [place // size for place in places]
    return tuple(found)


def take_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """A copy of some rows, as (rows, elements)."""
    return x.detach()[coordinates(tuple(x.shape[:-1]), count, x.device)]


def norm(
    x: torch.Tensor, live: torch.Tensor, *, rms: bool, eps: float, weight: Any, bias: Any, shifts: tuple[float, ...]
) -> list[ModuleRows]:
    """A layer norm or RMSNorm; ``shifts`` are the numbers that may be added to the weight: 1 if it is zero-centred."""
    wide = x.double()
    centred = wide if rms else wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normalized = centred * scale
    half = live.dtype in HALF
    found = []
    for shift in shifts:
        factor = torch.ones_like(wide[:1]) if weight is None else weight.detach().double() + shift
        product = normalized * factor
        exact = product if bias is None else product + bias.detach().double()
        size = product.abs() if bias is None else torch.maximum(product.abs(), exact.abs())
        # Differences from a large mean lose what the mean is larger than they are.
        lost = wide.abs().amax(-1, keepdim=True) * scale * factor.abs() if not rms else product.abs()
        unit = unit_of(size, live.dtype)
        ulps = _TWICE + (0.5 if bias is not None else 0.0) if half else 16.0
        repeats = repeats_of(x.abs() if rms else x) if half else None
        found.append(ModuleRows(live, exact, unit, ulps, 8 * _WORKING * lost, 2 if half else 0, repeats))
    return found


def softmax(
    scores: torch.Tensor, masked: torch.Tensor | None, live: torch.Tensor, scale: float, *, in_fp32: bool
) -> list[ModuleRows]:
    """Probabilities of rows of scores; ``masked`` places get none. Rows that are masked as a whole are not judged."""
    wide = scores.double() * scale
    if masked is not None:
        wide = wide.masked_fill(masked, -torch.inf)
    largest = wide.amax(-1, keepdim=True)
    empty = torch.isinf(largest)
    below = wide - torch.where(empty, 0.0, largest)
    exact = torch.where(empty, live.double(), torch.softmax(wide, -1))
    slack = exact * (2.0**-20 + 2 * _WORKING * torch.where(torch.isfinite(below), -below, 0.0))
    strict = in_fp32 and live.dtype in HALF
    ulps = _ONCE if strict else 4.0 if live.dtype in HALF else 16.0
    repeats = repeats_of(scores) if strict else None
    return [ModuleRows(live, exact, unit_of(exact, live.dtype), ulps, slack, 1 if strict else 0, repeats)]


class RouterSettings:
    """The settings of a router that decide what it should give."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.topk = int(getattr(module, "topk", 0) or getattr(config, "moe_router_topk", 1))
        self.score = str(getattr(config, "moe_router_score_function", "softmax"))
        self.pre = bool(getattr(config, "moe_router_pre_softmax", False))
        self.scaling = float(getattr(config, "moe_router_topk_scaling_factor", None) or 1.0)
        self.in_fp32 = getattr(config, "moe_router_dtype", None) in ("fp32", "fp64")
        self.free_choice = getattr(config, "moe_router_group_topk", None) is None


def router(
    x: torch.Tensor, live: torch.Tensor, chosen: torch.Tensor, module: Any, settings: RouterSettings
) -> list[ModuleRows]:
    """Probabilities of the chosen experts; one more column says how far the choice is from the largest scores."""
    wide, weight = x.double(), module.weight.detach().double()
    bias = getattr(module, "bias", None)
    logits = wide @ weight.t() + (0.0 if bias is None else bias.detach().double())
    lost = 2.0**-20 * (wide.abs() @ weight.abs().t())
    declared = torch.float32 if settings.in_fp32 else live.dtype
    if declared in HALF:
        lost = lost + torch.finfo(declared).eps / 2 * logits.abs()
    lost = lost.amax(-1, keepdim=True)
    eps = torch.finfo(declared).eps
    if settings.score == "sigmoid":
        rank = scores = torch.sigmoid(logits)
        if getattr(module, "expert_bias", None) is not None:
            rank = scores + module.expert_bias.detach().double()
        exact = torch.where(chosen, scores, 0.0)
        if settings.topk > 1:
            exact = exact / (exact.sum(-1, keepdim=True) + 1e-20)
        edge = 0.5 * lost + 4 * eps * rank.abs().amax(-1, keepdim=True)
    elif settings.pre:
        exact, rank, edge = torch.where(chosen, torch.softmax(logits, -1), 0.0), logits, 2 * lost + 4 * eps
    else:
        exact = torch.nan_to_num(torch.softmax(logits.masked_fill(~chosen, -torch.inf), -1))
        rank, edge = logits, 2 * lost
    exact = exact * settings.scaling
    lowest = torch.where(chosen, rank, torch.inf).amin(-1, keepdim=True)
    highest = torch.where(chosen, -torch.inf, rank).amax(-1, keepdim=True)
    passed = torch.clamp(highest - lowest, min=0.0) if settings.free_choice else torch.zeros_like(lowest)
    passed = torch.where(torch.isfinite(passed), passed, 0.0)
    exact, slack = torch.cat([exact, passed], -1), torch.cat([exact * torch.expm1(2 * lost), edge], -1)
    unit = unit_of(torch.maximum(exact, exact.amax(-1, keepdim=True) * 2.0**-20), declared)
    live = torch.cat([live, torch.zeros_like(live[:, :1])], -1)
    return [ModuleRows(live, exact, unit, 4.0 if declared in HALF else 32.0, slack)]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, live: torch.Tensor) -> list[ModuleRows]:
    """The loss of tokens from their whole rows of logits, in the 32 bits that it is always computed in."""
    wide = logits.double()
    largest = wide.amax(-1)
    total = torch.logsumexp(wide - largest.unsqueeze(-1), -1)
    inside = (labels >= 0) & (labels < wide.shape[-1])
    own = wide.gather(-1, torch.where(inside, labels, 0).unsqueeze(-1)).squeeze(-1) - largest
    own = torch.where(inside, own, 0.0)
    exact = (total - own).unsqueeze(0)
    size = (total.abs() + own.abs() + 1.0).unsqueeze(0)
    return [ModuleRows(live.unsqueeze(0), exact, unit_of(size, torch.float32), 32.0, torch.zeros_like(exact))]


def loss_on_coarse_grid(live: torch.Tensor) -> list[ModuleRows]:
    """Losses of tokens whose logits are spread over ranks: they may not all be numbers of 16 bits.

    A number of 32 bits is one of 16 bits once in 65,536 times (8,192 for float16), unless it was rounded to them.
    """
    wide = live.float()
    some = wide != 0
    found = torch.zeros((), dtype=torch.float64, device=live.device)
    for dtype in HALF:
        found = torch.maximum(found, ((wide == wide.to(dtype).float()) & some).sum() / some.sum().clamp(min=8))
    share = found.reshape(1, 1)
    nothing = torch.zeros_like(share)
    return [ModuleRows(nothing.float(), share, nothing + 2.0**-23, 0.0, nothing + 0.5)]


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of the GELU."""
    return F.gelu(x, approximate="tanh")


class Activation:
    """An activation function by what it computes: in 64 bits, and how it may be computed in the dtype of training."""

    def __init__(self, exact: Function, rival: Function | None = None, *, composite: bool = False) -> None:
        self.exact, self.rival, self.composite = exact, rival, composite
        """``composite``: several operators, each of which may round its result."""


_NAMED = {
    "silu": Activation(F.silu),
    "relu": Activation(F.relu),
    "squared_relu": Activation(lambda x: F.relu(x).square(), composite=True),
    "quick_gelu": Activation(lambda x: x * torch.sigmoid(1.702 * x), composite=True),
    "openai_gelu": Activation(tanh_gelu, composite=True),
    "gelu_impl": Activation(tanh_gelu, composite=True),
}
_GELU = {"none": Activation(F.gelu, tanh_gelu), "tanh": Activation(tanh_gelu, F.gelu)}


def activation_of(function: Any, *, fused: bool = False) -> Activation | None:
    """What a setting such as ``activation_func`` declares; None if it is unknown.

    ``fused``: Megatron's bias_activation_fusion, whose GELU is the tanh form.
    """
    if isinstance(function, nn.GELU):
        return _GELU.get(function.approximate)
    if isinstance(function, nn.SiLU):
        return _NAMED["silu"]
    if isinstance(function, partial) and function.func is F.gelu and not function.args:
        return _GELU.get(function.keywords.get("approximate", "none"))
    if function is F.gelu:
        return _NAMED["gelu_impl"] if fused else _GELU["none"]
    return _NAMED.get(getattr(function, "__name__", ""))


def activation(
    x: torch.Tensor,
    live: torch.Tensor,
    chosen: Activation,
    *,
    bias: Any = None,
    gated: bool = False,
    limit: float | None = None,
    offset: float = 0.0,
    scale: torch.Tensor | None = None,
) -> list[ModuleRows]:
    """What stands between the two matrix products of an MLP: bias, activation function, gate, scale of each token."""
    half = live.dtype in HALF
    wide = x.double() + (0.0 if bias is None else bias.detach().double())
    factor: torch.Tensor | float = 1.0 if scale is None else scale.double().unsqueeze(-1)

    def whole(function: Function, y: torch.Tensor) -> torch.Tensor:
        if not gated:
            return function(y) * factor
        gate, linear = y.chunk(2, dim=-1)
        if limit is not None:
            gate, linear = gate.clamp(max=limit), linear.clamp(min=-limit, max=limit)
        return function(gate) * (linear + offset) * factor

    exact = whole(chosen.exact, wide)
    # The sum with the bias may be rounded to the dtype of training.
    by = torch.finfo(x.dtype).eps / 2 if half and bias is not None else _WORKING
    moved = [wide * (1 + by)]
    if gated:  # one at a time: their effects may cancel
        gate, linear = wide.chunk(2, dim=-1)
        moved = [torch.cat([gate * (1 + by), linear], -1), torch.cat([gate, linear * (1 + by)], -1)]
    slack = sum((whole(chosen.exact, y) - exact).abs() for y in moved) + torch.zeros_like(exact)
    gate = wide.chunk(2, dim=-1)[0] if gated else wide
    inner = gate.abs() * (torch.finfo(live.dtype).eps * 2 if chosen.composite else 4 * _WORKING)
    slack = slack + inner * (whole(torch.ones_like, wide).abs() if gated or scale is not None else 1.0)
    roundings = 1 + gated + (scale is not None)
    ulps = _ONCE + 1.0 * (roundings - 1) if half else 16.0
    rival = whole(chosen.rival, wide) if chosen.rival is not None else None
    if chosen.composite:
        ulps *= 4
    return [ModuleRows(live, exact, unit_of(exact, live.dtype), ulps, slack, rival=rival)]
