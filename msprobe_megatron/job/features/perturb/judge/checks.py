"""The checks: a call, its live result, and a line for statistics. One function per mode.

All run without gradients, unseen by modes and hooks, on tensors that are only read. A second result is compared as a
whole; the exact one, in 64 bits, on rows.

Gradients are compared with the vector-Jacobian product in 64 bits. The gradient of an input that was broadcast is a sum
with one term per element that the input went into, whatever the class of the operator. Such a sum may cancel, so its
error is measured against the root of the sum of the squares of its terms, which is the size of what is rounded on the
way. The terms are what the product gives for the input expanded to the shape of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from msprobe_megatron.job.features.perturb.judge.tolerance import (
    HALF,
    WORKING,
    add_inner_rounding,
    compare_rows,
    nudge,
    scramble,
)
from msprobe_megatron.job.features.perturb.judge.verdict import COLUMN, REFERENCE
from msprobe_megatron.job.features.perturb.run import changed_inputs
from msprobe_megatron.job.features.perturb.run.changed_inputs import Change, convert, convert_arguments, double
from msprobe_megatron.job.features.perturb.select.sampling import Sample, sample, terms_of
from msprobe_megatron.job.measure import pair
from msprobe_megatron.job.sites.calls.arguments import unread_arguments

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Check = Callable[["CheckedCall", torch.Tensor], None]
_DX, _X, _SUM = COLUMN["dx_squares"], COLUMN["x_squares"], COLUMN["input_sum"]
_NAN, _NAN_APART, _INF_APART = COLUMN["nan_live"], COLUMN["nan_apart"], COLUMN["inf_apart"]
_HOST = slice(COLUMN["cpu_abs"], COLUMN["cpu_balance"] + 1)
EXACT = (torch.bfloat16, torch.float16, torch.float32)
_ROOTS = {dtype: strength**0.5 for dtype, strength in changed_inputs.STRENGTH.items()}
BACKWARD_FLOOR = 1e-3
_MSPROBE_CHANGES = {
    "add_noise": changed_inputs.add_noise,
    "bit_noise": changed_inputs.flip_last_bit,
    "change_value": changed_inputs.swap_ends,
}


@dataclass
class CheckedCall:
    """One call that is examined. ``run`` repeats it on other arguments, or raises `CannotRun`."""

    api: str
    kind: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    live: torch.Tensor
    pick: Callable[[Any], torch.Tensor]
    """Extracts the tensor that corresponds to ``live`` from a second result."""
    run: Run
    rows: int
    ulps: int
    stage: str = "forward"
    again: bool = True
    """Whether the whole call is repeated, besides the rows."""
    numbering: Callable[[torch.Tensor], changed_inputs.Numbering | None] = lambda x: None  # noqa: E731
    terms: int = 1
    parameters: tuple[torch.Tensor, ...] = ()
    """Parameters of a module: a NaN in one of them is not the module's fault."""
    forward: Run | None = None
    """In backward: the call itself, where ``run`` is its vector-Jacobian product."""
    note: str = ""
    """What the call is expected to do, for the report of a wrong one."""
    shared: dict[Any, Any] | None = None
    """Results that serve all outputs of the call; None if it has one."""

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, or returned for another output of the same call."""
        if self.shared is None:
            return make()
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


def repeat(call: CheckedCall, line: torch.Tensor) -> None:
    """The same call again: nothing may differ."""
    second = call.pick(call.once("again", lambda: call.run(call.args, call.kwargs)))
    if second.shape == call.live.shape and second.dtype == call.live.dtype:
        pair.compare(call.live, second, line)
    input_sum(call, line)


def precision(call: CheckedCall, line: torch.Tensor) -> None:
    """The rows in 64 bits, and the whole call again as it is."""
    if call.again:
        repeat(call, line)
    else:
        input_sum(call, line)
    if call.live.dtype not in EXACT or call.live.numel() == 0:
        return
    part = sample(call.api, call.kind, call.args, call.kwargs, call.live, call.rows)
    if part is not None:
        call.terms = part.terms
        _exact(call, part, line, double)


def host(call: CheckedCall, line: torch.Tensor) -> None:
    """The whole call on the host, in 64 bits."""
    if call.live.dtype in EXACT and call.live.numel():
        call.terms = terms_of(call.kind, call.args, call.live, call.api)
        part = Sample(call.args, call.kwargs, lambda x: x.to("cpu"), call.terms)
        _exact(call, part, line, lambda x: double(x.to("cpu")))
    input_sum(call, line)


def _exact(call: CheckedCall, part: Sample, line: torch.Tensor, change: Change) -> None:
    def runs() -> tuple[Any, Any, Any]:
        args, kwargs = convert_arguments(part.args, part.kwargs, change)
        return args, call.run(args, kwargs), call.run(convert(args, nudge), convert(kwargs, nudge))

    # Rows are cut by the shape of an output; the whole call is that of all outputs.
    args, *results = call.once(("exact", change), runs) if part.args is call.args else runs()
    exact, nudged = map(call.pick, results)
    live = part.cut(call.live)
    if exact.shape == live.shape and exact.is_floating_point():
        exact, nudged = exact.double(), add_inner_rounding(call.api, args, nudged.double())
        compare_rows(live, exact, nudged, call.kind, part.terms, line[REFERENCE])


def ulp_noise(call: CheckedCall, line: torch.Tensor) -> None:
    """Noise in the last places of the first input; how far that moves the result."""
    args, kwargs, moved = _first_changed(call, lambda x: changed_inputs.add_ulps(x, call.ulps, call.numbering(x)))
    if moved is None:
        return
    sizes = torch.empty(pair.COUNT, dtype=line.dtype, device=line.device)
    pair.compare(*moved, sizes)
    line[_DX], line[_X] = sizes[COLUMN["diff_squares"]], sizes[COLUMN["live_squares"]]
    call.terms = terms_of(call.kind, call.args, call.live, call.api)
    second = call.pick(call.run(args, kwargs))
    if second.shape == call.live.shape and second.dtype == call.live.dtype:
        pair.compare(call.live, second, line)
    input_sum(call, line)


def swapped_rows(call: CheckedCall, line: torch.Tensor) -> None:
    """Two rows swapped in the inputs, and swapped back in the result: nothing else may change."""
    first = next((x for x in (*call.args, *call.kwargs.values()) if isinstance(x, torch.Tensor)), None)
    live = call.live
    if first is None or first.shape != live.shape or live.dim() < 2 or live.size(0) < 2:
        return

    def swap(x: torch.Tensor) -> torch.Tensor:
        return changed_inputs.swap_rows(x, 0) if x.dim() == live.dim() and x.size(0) == live.size(0) else x

    if call.kind not in ("elementwise", "softmax", "norm"):
        return
    second = call.pick(call.run(convert(call.args, swap), convert(call.kwargs, swap)))
    pair.compare(live, changed_inputs.swap_rows(second, 0), line)
    input_sum(call, line)


def as_msprobe(mode: str) -> Check:
    """Msprobe's comparison of a whole second result, for one of its modes."""

    def check(call: CheckedCall, line: torch.Tensor) -> None:
        changed = _changed(mode, call)
        if changed is None:
            return
        second = call.pick(call.run(*changed))
        if mode == "to_cpu":
            against_host(call.live, second, line)
            return
        floor = BACKWARD_FLOOR if call.stage == "backward" else _ROOTS.get(second.dtype, 1e-4)
        if second.shape == call.live.shape:
            pair.compare(call.live, second, line, floor)

    return check


def _changed(mode: str, call: CheckedCall) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if mode == "no_change":
        return call.args, call.kwargs
    if mode == "to_cpu":
        return convert_arguments(call.args, call.kwargs, changed_inputs.on_host)
    if mode == "improve_precision":
        lower = changed_inputs.has_lower((call.args, call.kwargs))
        return convert_arguments(call.args, call.kwargs, changed_inputs.single) if lower else None
    args, kwargs, moved = _first_changed(call, _MSPROBE_CHANGES[mode])
    return None if moved is None else (args, kwargs)


def on_host(call: CheckedCall, line: torch.Tensor) -> None:
    """For preheat: the statistics of msprobe's comparison with the host, beside those of the mode."""
    args, kwargs = convert_arguments(call.args, call.kwargs, changed_inputs.on_host)
    against_host(call.live, call.pick(call.run(args, kwargs)), line)


def against_host(live: torch.Tensor, golden: torch.Tensor, line: torch.Tensor) -> None:
    """Msprobe's three errors: absolute below 1, relative above, and their mean; the live result is only read."""
    wide = torch.float32 if live.dtype in HALF else torch.float64  # enough for limits of 2**-8 and 2**-11
    most = torch.zeros(2, dtype=line.dtype, device=live.device)
    total = torch.zeros(3, dtype=line.dtype, device=live.device)
    for ours, theirs in pair.pieces(live.detach(), golden.detach().to(live.device)):
        x, y = ours.to(wide), theirs.to(wide)
        error = torch.where(torch.isfinite(x) & torch.isfinite(y), x - y, 0.0)
        small, size = x.abs() < 1, y.abs()
        absolute = torch.where(small, error.abs(), 0.0).max()
        relative = torch.where(small, 0.0, error.abs() / size.clamp(min=1e-30)).max()
        most = torch.maximum(most, torch.stack([absolute, relative]).to(line.dtype))
        mean = (error / torch.where(size >= 1, size, 1.0)).sum(dtype=line.dtype)
        total += torch.stack([mean, (x.isnan() != y.isnan()).sum(), (x.isinf() != y.isinf()).sum()]).to(line.dtype)
    line[_HOST] = torch.cat([most, total[:1] / max(live.numel(), 1)])
    line[_NAN_APART], line[_INF_APART] = total[1], total[2]


def _first_changed(
    call: CheckedCall, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, torch.Tensor] | None]:
    """Arguments with the first floating-point tensor changed that is read, and that tensor before and after."""
    args, kwargs = call.args, call.kwargs
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    inner = args[:2] if call.stage == "backward" and call.forward is not None else (args, kwargs)
    unread = ignored(call.api, *inner)

    def first(x: torch.Tensor) -> torch.Tensor:
        if moved or id(x) in unread or not x.is_floating_point():
            return x
        y = change(x)
        if y is None:
            return x
        moved.append((x.detach(), y))
        return y

    return convert(args, first), convert(kwargs, first), moved[0] if moved else None


def ignored(api: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Ids of the arguments that the call does not read, such as the uninitialized memory that attention passes."""
    return {id(x) for x in changed_inputs.tensors_of([value for _, value in unread_arguments(api, args, kwargs)])}


def input_sum(call: CheckedCall, line: torch.Tensor) -> None:
    """A number that is not finite if any input has an element that is not; only needed where the result has NaN.

    On a device it is always computed, because reading the result back would block.
    """
    if line.is_cpu and not line[_NAN] > 0:
        return
    total: Any = 0.0
    unread = ignored(call.api, call.args, call.kwargs)
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, torch.Tensor) and id(value) not in unread and value.is_floating_point():
            total = total + value.detach().sum(dtype=torch.float32)
    line[_SUM] = total


def rows_of_gradient(number: int) -> Check:
    """The check of improve_precision: the gradient of the ``number``-th tensor, on rows where these are separable."""

    def check(call: CheckedCall, line: torch.Tensor) -> None:
        if call.again:
            repeat(call, line)
        args, kwargs, given = call.args
        part = sample(call.api, call.kind, args, kwargs, given, call.rows, backward=True)
        if part is None or call.live.dtype is torch.float64:
            return
        own = changed_inputs.tensors_of((part.args, part.kwargs))[number]
        by_row = changed_inputs.tensors_of((args, kwargs))[number].shape == given.shape
        live = part.cut(call.live) if by_row else None
        if call.kind == "gemm" and part.batches:
            live = part.cut(call.live)
        if live is None and own.shape == call.live.shape and part.cut(given).shape == given.shape:
            live = call.live
        if live is not None:  # else it is a sum over all rows, of which only some are computed
            _compare_gradient(call, part, live, number, line, double)

    return check


def whole_gradient(number: int) -> Check:
    """The check of to_cpu: the whole gradient, on the host."""

    def check(call: CheckedCall, line: torch.Tensor) -> None:
        input_sum(call, line)
        if call.live.dtype in EXACT and call.live.numel():
            args, kwargs, given = call.args
            part = Sample(args, kwargs, _to_host, terms_of(call.kind, args, given, call.api))
            _compare_gradient(call, part, _to_host(call.live), number, line, lambda x: double(_to_host(x)))

    return check


def _compare_gradient(
    call: CheckedCall, part: Sample, live: torch.Tensor, number: int, line: torch.Tensor, change: Change
) -> None:
    given = change(part.cut(call.args[2]))
    args, kwargs = convert_arguments(part.args, part.kwargs, change)
    # The backward works on results that the forward has rounded to 16 bits.
    by = torch.finfo(live.dtype).eps / 2 if live.dtype in HALF else 2 * WORKING

    def moved_by(x: torch.Tensor) -> torch.Tensor:
        return nudge(x, by)

    kind, call.terms = call.kind, terms_of_gradient(call.kind, part.terms, given, live)
    broadcast = kind == "elementwise" and live.numel() < given.numel() and _broadcasts_to(live.shape, given.shape)
    if broadcast:
        kind, call.terms = "reduction", given.numel() // live.numel()
    if broadcast and call.api.startswith("torch."):  # other functions may accept only the shape they were given
        expanded = _convert_one((args, kwargs), number, lambda x: x.expand(given.shape))
        terms = call.run((*expanded, given), {})
        exact, size = terms.sum_to_size(live.shape), terms.square().sum_to_size(live.shape).sqrt()
    else:
        exact = call.run((args, kwargs, given), {})
        size = _softmax_terms(call, args, kwargs, given) if kind == "softmax" else None
        if size is None or size.shape != live.shape:
            size = call.run((args, kwargs, scramble(given)), {})
    nudged = call.run((*convert((args, kwargs), moved_by), moved_by(given)), {})
    if exact.shape == live.shape:
        compare_rows(live, exact, nudged, kind, call.terms, line[REFERENCE], by, scrambled=size)


def terms_of_gradient(kind: str, of_forward: int, given: torch.Tensor, live: torch.Tensor) -> int:
    """How many numbers are added up for an element of the gradient."""
    if kind == "gemm":
        # A product and its gradients take the same number of multiplications.
        return max(1, given.numel() * of_forward // max(live.numel(), 1))
    return max(of_forward, given.shape[-1] if given.dim() else 1, given.numel() // max(live.numel(), 1))


def _softmax_terms(call: CheckedCall, args: Any, kwargs: Any, given: torch.Tensor) -> torch.Tensor | None:
    """Size of the terms of a softmax's gradient, before they cancel; None for other functions.

    The gradient is y (g - sum(y g)), and y is stored in the precision of training: where one element of a row is nearly
    1 the difference is nearly zero and consists of rounding errors of y.
    """
    if call.forward is None or "softmax" not in call.api:
        return None
    y = call.forward(args, kwargs)
    dim = kwargs.get("dim", next((value for value in args[1:] if type(value) is int), -1))
    if not isinstance(y, torch.Tensor) or y.shape != given.shape or type(dim) is not int or not y.dim():
        return None
    if "log_softmax" in call.api:
        parts = given.abs() + y.exp() * (1 + y.abs()) * given.sum(dim, keepdim=True).abs()
    else:
        parts = y.abs() * (given.abs() + (y * given).abs().sum(dim, keepdim=True))
    return parts.amax(dim, keepdim=True).expand(y.shape)


def _convert_one(values: Any, number: int, change: Change) -> Any:
    """Nested containers with the ``number``-th tensor changed."""
    position = iter(range(1 << 30))
    one: Callable[[torch.Tensor], torch.Tensor] = lambda x: change(x) if next(position) == number else x  # noqa: E731
    return convert(values, one)


def _broadcasts_to(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a tensor of one shape is broadcast to another."""
    over = len(to) - len(shape)
    return over >= 0 and all(own in (1, whole) for own, whole in zip(shape, to[over:], strict=True))


def _to_host(x: torch.Tensor) -> torch.Tensor:
    return x.to("cpu")


ULP: dict[str, Check] = {
    "improve_precision": precision,
    "no_change": repeat,
    "add_noise": ulp_noise,
    "bit_noise": ulp_noise,
    "change_value": swapped_rows,
    "to_cpu": host,
}
