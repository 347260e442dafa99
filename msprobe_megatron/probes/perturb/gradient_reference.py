"""Gradients against the exact ones: the vector-Jacobian product in 64 bits, on rows or on the host, and its limits.

The gradient of an input that was broadcast is a sum, whatever the class of its operator: of one term for each element
that the input went into. Such a sum may cancel, so it is measured against the root of the sum of the squares of its
terms, which is the size of what is rounded on the way. These terms are what the product gives for the input spread out
to the shape of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from msprobe_megatron.probes.perturb import checks, twins
from msprobe_megatron.probes.perturb.checks import Case
from msprobe_megatron.probes.perturb.classes import HALF
from msprobe_megatron.probes.perturb.figures import REFERENCE
from msprobe_megatron.probes.perturb.reference import WORKING, judge_rows, nudge, scramble
from msprobe_megatron.probes.perturb.sampling import Sample, sample, terms_of


def rows_of_gradient(number: int) -> checks.Check:
    """The check of improve_precision: the gradient of the ``number``-th tensor, on rows where they can be told apart.

    Example::

        examiner.examine(case, name, 0, where, "0", rows_of_gradient(0))
    """

    def check(case: Case, line: torch.Tensor) -> None:
        if case.again:
            checks.repeat(case, line)
        args, kwargs, given = case.args
        part = sample(case.api, case.kind, args, kwargs, given, case.rows, backward=True)
        if part is None or case.live.dtype is torch.float64:
            return
        own = twins.tensors_of((part.args, part.kwargs))[number]
        by_row = twins.tensors_of((args, kwargs))[number].shape == given.shape
        live = part.cut(case.live) if by_row else None
        if case.kind == "gemm" and part.batches:
            live = part.cut(case.live)
        if live is None and own.shape == case.live.shape and part.cut(given).shape == given.shape:
            live = case.live
        if live is not None:  # else a sum over all rows, of which only some are computed
            _judge(case, part, live, number, line, twins.double)

    return check


def whole_gradient(number: int) -> checks.Check:
    """The check of to_cpu: all of the gradient, on the host.

    Example::

        examiner.examine(case, name, 0, where, "0", whole_gradient(0))
    """

    def check(case: Case, line: torch.Tensor) -> None:
        checks.input_sum(case, line)
        if case.live.dtype in checks.EXACT and case.live.numel():
            args, kwargs, given = case.args
            part = Sample(args, kwargs, _to_host, terms_of(case.kind, args, given, case.api))
            _judge(case, part, _to_host(case.live), number, line, lambda x: twins.double(_to_host(x)))

    return check


def _judge(case: Case, part: Sample, live: torch.Tensor, number: int, line: torch.Tensor, change: twins.Change) -> None:
    given = change(part.cut(case.args[2]))
    args, kwargs = twins.dtypes_asked(part.args, part.kwargs, change)
    # What the forward has rounded to 16 bits is what its backward works with.
    by = torch.finfo(live.dtype).eps / 2 if live.dtype in HALF else 2 * WORKING

    def moved_by(x: torch.Tensor) -> torch.Tensor:
        return nudge(x, by)

    kind, case.terms = case.kind, _terms(case.kind, part.terms, given, live)
    broadcast = kind == "elementwise" and live.numel() < given.numel() and _spreads(live.shape, given.shape)
    if broadcast:
        kind, case.terms = "reduction", given.numel() // live.numel()
    if broadcast and case.api.startswith("torch."):  # others may know no other shape than the one they are given
        spread = _change_one((args, kwargs), number, lambda x: x.expand(given.shape))
        terms = case.run((*spread, given), {})
        exact, size = terms.sum_to_size(live.shape), terms.square().sum_to_size(live.shape).sqrt()
    else:
        exact = case.run((args, kwargs, given), {})
        size = _of_probabilities(case, args, kwargs, given) if kind == "softmax" else None
        if size is None or size.shape != live.shape:
            size = case.run((args, kwargs, scramble(given)), {})
    nudged = case.run((*twins.convert((args, kwargs), moved_by), moved_by(given)), {})
    if exact.shape == live.shape:
        judge_rows(live, exact, nudged, kind, case.terms, line[REFERENCE], by, scrambled=size)


def _terms(kind: str, of_forward: int, given: torch.Tensor, live: torch.Tensor) -> int:
    """How many numbers an element of the gradient is made from."""
    if kind == "gemm":
        # A product and its gradients take the same number of multiplications.
        return max(1, given.numel() * of_forward // max(live.numel(), 1))
    return max(of_forward, given.shape[-1] if given.dim() else 1, given.numel() // max(live.numel(), 1))


def _of_probabilities(case: Case, args: Any, kwargs: Any, given: torch.Tensor) -> torch.Tensor | None:
    """What a row of a softmax's gradient is made from, before it cancels.

    The gradient is y (g - sum(y g)), and y is kept in the precision of training: where one of a row is nearly 1 the
    difference is nearly nothing, and what y has lost is all of it. None for what is no such function.
    """
    if case.forward is None or "softmax" not in case.api:
        return None
    y = case.forward(args, kwargs)
    dim = kwargs.get("dim", next((value for value in args[1:] if type(value) is int), -1))
    if not isinstance(y, torch.Tensor) or y.shape != given.shape or type(dim) is not int or not y.dim():
        return None
    if "log_softmax" in case.api:
        parts = given.abs() + y.exp() * (1 + y.abs()) * given.sum(dim, keepdim=True).abs()
    else:
        parts = y.abs() * (given.abs() + (y * given).abs().sum(dim, keepdim=True))
    return parts.amax(dim, keepdim=True).expand(y.shape)


def _change_one(values: Any, number: int, change: twins.Change) -> Any:
    """Containers with the ``number``-th tensor changed."""
    position = iter(range(1 << 30))
    one: Callable[[torch.Tensor], torch.Tensor] = lambda x: change(x) if next(position) == number else x  # noqa: E731
    return twins.convert(values, one)


def _spreads(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a tensor of one shape is broadcast to another."""
    over = len(to) - len(shape)
    return over >= 0 and all(own in (1, whole) for own, whole in zip(shape, to[over:], strict=True))


def _to_host(x: torch.Tensor) -> torch.Tensor:
    return x.to("cpu")
