"""The checks themselves: a call, its live result, and a line to put figures into. One function a mode.

All run without gradients, unseen by modes and hooks, on tensors that are only read. A second result is compared whole;
the exact one, in 64 bits, on rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from msprobe_megatron.measure import pair
from msprobe_megatron.probes.perturb import noise, reference, twins
from msprobe_megatron.probes.perturb.classes import HALF
from msprobe_megatron.probes.perturb.figures import PLACE, REFERENCE
from msprobe_megatron.probes.perturb.sampling import Sample, sample, terms_of

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Check = Callable[["Case", torch.Tensor], None]
_DX, _X, _SUM = PLACE["dx_squares"], PLACE["x_squares"], PLACE["input_sum"]
_NAN, _NAN_APART, _INF_APART = PLACE["nan_live"], PLACE["nan_apart"], PLACE["inf_apart"]
_HOST = slice(PLACE["cpu_abs"], PLACE["cpu_balance"] + 1)
EXACT = (torch.bfloat16, torch.float16, torch.float32)
_ROOTS = {dtype: strength**0.5 for dtype, strength in noise.STRENGTH.items()}
BACKWARD_FLOOR = 1e-3


@dataclass
class Case:
    """One call under examination. ``run`` repeats it on other arguments, or raises `CannotRun`."""

    api: str
    kind: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    live: torch.Tensor
    pick: Callable[[Any], torch.Tensor]
    """Takes the tensor that stands where ``live`` does out of a second result."""
    run: Run
    rows: int
    ulps: int
    stage: str = "forward"
    again: bool = True
    """Whether the whole call is repeated, besides the rows."""
    numbering: Callable[[torch.Tensor], noise.Numbering | None] = lambda x: None  # noqa: E731
    terms: int = 1
    parameters: tuple[torch.Tensor, ...] = ()
    """Those of a module: a NaN in one of them is not the module's doing."""
    forward: Run | None = None
    """In backward: the call itself, where ``run`` is its vector-Jacobian product."""


def repeat(case: Case, line: torch.Tensor) -> None:
    """The same call again: nothing may differ."""
    second = case.pick(case.run(case.args, case.kwargs))
    if second.shape == case.live.shape and second.dtype == case.live.dtype:
        pair.compare(case.live, second, line)
    input_sum(case, line)


def precision(case: Case, line: torch.Tensor) -> None:
    """The rows in 64 bits, and the whole call again as it is."""
    if case.again:
        repeat(case, line)
    else:
        input_sum(case, line)
    if case.live.dtype not in EXACT or case.live.numel() == 0:
        return
    part = sample(case.api, case.kind, case.args, case.kwargs, case.live, case.rows)
    if part is not None:
        case.terms = part.terms
        _exact(case, part, line, twins.double)


def host(case: Case, line: torch.Tensor) -> None:
    """The whole call on the host, in 64 bits."""
    if case.live.dtype in EXACT and case.live.numel():
        case.terms = terms_of(case.kind, case.args, case.live, case.api)
        part = Sample(case.args, case.kwargs, lambda x: x.to("cpu"), case.terms)
        _exact(case, part, line, lambda x: twins.double(x.to("cpu")))
    input_sum(case, line)


def _exact(case: Case, part: Sample, line: torch.Tensor, change: twins.Change) -> None:
    args, kwargs = twins.dtypes_asked(part.args, part.kwargs, change)
    exact = case.pick(case.run(args, kwargs))
    nudged = case.pick(case.run(twins.convert(args, reference.nudge), twins.convert(kwargs, reference.nudge)))
    live = part.cut(case.live)
    if exact.shape == live.shape and exact.is_floating_point():
        exact, nudged = exact.double(), reference.inner(case.api, args, nudged.double())
        reference.judge_rows(live, exact, nudged, case.kind, part.terms, line[REFERENCE])


def ulp_noise(case: Case, line: torch.Tensor) -> None:
    """The first input moved in its last places; how far that moves the result."""
    args, kwargs, moved = _first_changed(case, lambda x: noise.add_ulps(x, case.ulps, case.numbering(x)))
    if moved is None:
        return
    sizes = torch.empty(pair.COUNT, dtype=line.dtype, device=line.device)
    pair.compare(*moved, sizes)
    line[_DX], line[_X] = sizes[PLACE["diff_squares"]], sizes[PLACE["live_squares"]]
    case.terms = terms_of(case.kind, case.args, case.live, case.api)
    second = case.pick(case.run(args, kwargs))
    if second.shape == case.live.shape and second.dtype == case.live.dtype:
        pair.compare(case.live, second, line)
    input_sum(case, line)


def swapped_rows(case: Case, line: torch.Tensor) -> None:
    """Two rows change places in the inputs, and back in the result: nothing else may change."""
    first = next((x for x in (*case.args, *case.kwargs.values()) if isinstance(x, torch.Tensor)), None)
    live = case.live
    if first is None or first.shape != live.shape or live.dim() < 2 or live.size(0) < 2:  # noqa: PLR2004
        return

    def swap(x: torch.Tensor) -> torch.Tensor:
        return noise.swap_rows(x, 0) if x.dim() == live.dim() and x.size(0) == live.size(0) else x

    if case.kind not in ("elementwise", "softmax", "norm"):
        return
    second = case.pick(case.run(twins.convert(case.args, swap), twins.convert(case.kwargs, swap)))
    pair.compare(live, noise.swap_rows(second, 0), line)
    input_sum(case, line)


def as_msprobe(mode: str) -> Check:
    """Msprobe's comparison of a whole second result, for one of its modes."""

    def check(case: Case, line: torch.Tensor) -> None:
        changed = _changed(mode, case)
        if changed is None:
            return
        second = case.pick(case.run(*changed))
        if mode == "to_cpu":
            against_host(case.live, second, line)
            return
        floor = BACKWARD_FLOOR if case.stage == "backward" else _ROOTS.get(second.dtype, 1e-4)
        if second.shape == case.live.shape:
            pair.compare(case.live, second, line, floor)

    return check


def _changed(mode: str, case: Case) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if mode == "no_change":
        return case.args, case.kwargs
    if mode == "to_cpu":
        return twins.dtypes_asked(case.args, case.kwargs, twins.on_host)
    if mode == "improve_precision":
        lower = twins.has_lower((case.args, case.kwargs))
        return twins.dtypes_asked(case.args, case.kwargs, twins.single) if lower else None
    change = {"add_noise": noise.add_noise, "bit_noise": noise.flip_last_bit, "change_value": noise.swap_ends}[mode]
    args, kwargs, moved = _first_changed(case, change)
    return None if moved is None else (args, kwargs)


def on_host(case: Case, line: torch.Tensor) -> None:
    """For preheat: the figures of msprobe's comparison with the host, beside those of the mode."""
    args, kwargs = twins.dtypes_asked(case.args, case.kwargs, twins.on_host)
    against_host(case.live, case.pick(case.run(args, kwargs)), line)


def against_host(live: torch.Tensor, golden: torch.Tensor, line: torch.Tensor) -> None:
    """Msprobe's three errors: absolute below 1, relative above, and their mean; the live result is only read.

    Example::

        against_host(y, y_of_host, line)
    """
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
    case: Case, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, torch.Tensor] | None]:
    """Arguments with the first floating tensor changed that is read, and that tensor before and after."""
    args, kwargs = case.args, case.kwargs
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    unread = ignored(*args[:2]) if case.stage == "backward" and case.forward is not None else ignored(args, kwargs)

    def first(x: torch.Tensor) -> torch.Tensor:
        if moved or x is unread or not x.is_floating_point():
            return x
        y = change(x)
        if y is None:
            return x
        moved.append((x.detach(), y))
        return y

    return twins.convert(args, first), twins.convert(kwargs, first), moved[0] if moved else None


def ignored(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `baddbmm` is given to add, times a beta of 0: memory that nobody has written to, as attention has it.

    Example::

        ignored((buffer, q, k), {"beta": 0.0}) is buffer
    """
    return args[0] if args and kwargs.get("beta") == 0 else None


def input_sum(case: Case, line: torch.Tensor) -> None:
    """One number that is not finite if any input has an element that is not; only asked where the result has NaN.

    On a device nobody waits to know that: there it is always computed.
    """
    if line.is_cpu and not line[_NAN] > 0:
        return
    total: Any = 0.0
    unread = ignored(case.args, case.kwargs)
    for value in (*case.args, *case.kwargs.values()):
        if isinstance(value, torch.Tensor) and value is not unread and value.is_floating_point():
            total = total + value.detach().sum(dtype=torch.float32)
    line[_SUM] = total


ULP: dict[str, Check] = {
    "improve_precision": precision,
    "no_change": repeat,
    "add_noise": ulp_noise,
    "bit_noise": ulp_noise,
    "change_value": swapped_rows,
    "to_cpu": host,
}
