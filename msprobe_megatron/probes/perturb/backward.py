"""The backward of a call: its vector-Jacobian product, taken again when the gradients pass, and compared with them.

While the forward runs only references are kept, of tensors that autograd keeps anyway. When the gradient of the result
has come and those of the inputs have been computed, the same product is taken again on detached inputs: as it is, and
on a few rows in 64 bits. A tensor that was written to or freed in between is left alone. Hooks stand on autograd nodes
and insert nothing into the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from msprobe_megatron.probes.perturb import checks, twins
from msprobe_megatron.probes.perturb.checks import Case
from msprobe_megatron.probes.perturb.classes import HALF, class_of
from msprobe_megatron.probes.perturb.examiner import Examiner
from msprobe_megatron.probes.perturb.figures import REFERENCE
from msprobe_megatron.probes.perturb.reference import WORKING, judge_rows, nudge, scramble
from msprobe_megatron.probes.perturb.safety import CannotRun, Guard, Refused
from msprobe_megatron.probes.perturb.sampling import sample

_MOST_NODES = 32
_own_work = torch._C.DisableTorchFunction


class _Waiting:
    """A call whose gradients are awaited."""

    def __init__(self, api: str, name: str, in_step: int, where: Any, function: Any, args: Any, kwargs: Any) -> None:
        self.api, self.name, self.in_step, self.where, self.function = api, name, in_step, where, function
        self.args, self.kwargs = twins.convert(args, torch.Tensor.detach), twins.convert(kwargs, torch.Tensor.detach)
        self.versions = [(x, x._version, x.shape) for x in _tensors((args, kwargs))]
        self.grad_output: torch.Tensor | None = None
        self.missing = 0
        self.gradients: dict[int, torch.Tensor] = {}
        """By number of the tensor among the arguments."""

    def intact(self) -> bool:
        return all(x._version == version and x.shape == shape for x, version, shape in self.versions)


class BackwardExaminer:
    """Sets hooks in the forward, examines in the backward.

    Example::

        examiner.watch_gradients = BackwardExaminer(examiner).watch
    """

    def __init__(self, examiner: Examiner) -> None:
        self._examiner, self._asked = examiner, examiner.asked
        self.lost = 0
        self.round = 0

    def watch(
        self, api: str, name: str, in_step: int, where: Any, function: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Await the gradients of a call that has just been made."""
        if not isinstance(result, torch.Tensor) or result.grad_fn is None or not result.is_floating_point():
            return
        inputs = _tensors((args, kwargs))
        edges = _edges(result.grad_fn, inputs)
        if not edges:
            return
        waiting = _Waiting(api, name, in_step, where, function, args, kwargs)
        this_round, slot = self.round, result.output_nr
        by_node: dict[Any, list[tuple[int, int]]] = {}
        for number, node, index in edges:
            by_node.setdefault(node, []).append((number, index))
        waiting.missing = len(by_node)

        def arrived(grad_outputs: Any) -> None:
            if self.round == this_round:
                waiting.grad_output = grad_outputs[slot]

        result.grad_fn.register_prehook(arrived)
        for node, wanted in by_node.items():
            node.register_hook(self._passed(waiting, wanted, this_round))

    def _passed(self, waiting: _Waiting, wanted: list[tuple[int, int]], this_round: int) -> Callable[[Any, Any], None]:
        def hook(grad_inputs: Any, grad_outputs: Any) -> None:
            if self.round != this_round:
                return
            try:
                with _own_work(), torch.no_grad():
                    for number, index in wanted:
                        gradient = grad_inputs[index]
                        if gradient is not None:
                            before = waiting.gradients.get(number)
                            waiting.gradients[number] = gradient if before is None else before + gradient
                    waiting.missing -= 1
                    if not waiting.missing and waiting.grad_output is not None:
                        self._examine(waiting)
            except Exception as error:
                self._examiner._fault(error, f"examination of the backward of {waiting.name}")

        return hook

    def _examine(self, waiting: _Waiting) -> None:
        if not waiting.intact():
            self.lost += 1
            return
        given = waiting.grad_output
        where = waiting.where._replace(phase="backward")
        for number, live in waiting.gradients.items():
            case = Case(
                waiting.api,
                class_of(waiting.api),
                (waiting.args, waiting.kwargs, given),
                {},
                live,
                lambda result: result,
                self._product(waiting, number),
                self._asked.rows,
                self._asked.ulps,
                "backward",
                self._examiner.whole_again(waiting.name),
            )
            ulp = self._examiner.profile == "ulp" and self._asked.mode == "improve_precision"
            check = self._precision(waiting, number) if ulp else None
            self._examiner.examine(case, waiting.name, waiting.in_step, where, str(number), check)

    def _product(self, waiting: _Waiting, number: int) -> checks.Run:
        """The vector-Jacobian product with respect to one of the tensors, as a function of inputs and gradient."""

        def run(some: tuple[Any, ...], more: dict[str, Any]) -> torch.Tensor:
            args, kwargs, given = some

            def forward(*values: Any) -> torch.Tensor:
                position = iter(range(1 << 30))
                leaves: list[torch.Tensor] = []

                def leaf(x: torch.Tensor) -> torch.Tensor:
                    x = x.detach()
                    if next(position) == number:
                        leaves.append(x.requires_grad_())
                    return x

                with torch.enable_grad():
                    result = waiting.function(*twins.convert(values[0], leaf), **twins.convert(values[1], leaf))
                    gradient = values[2].to(device=result.device, dtype=result.dtype).reshape(result.shape)
                    return torch.autograd.grad(result, leaves[0], gradient)[0]

            try:
                if not waiting.api.startswith("torch."):
                    with Guard():
                        return forward(args, kwargs, given)
                self._examiner.rerun.prove(waiting.function, args, kwargs)
                return forward(args, kwargs, given)
            except (Refused, CannotRun):
                raise
            except Exception as error:
                raise CannotRun(f"{type(error).__name__}: {str(error)[:160]}") from error

        return run

    def _precision(self, waiting: _Waiting, number: int) -> checks.Check:
        def check(case: Case, line: torch.Tensor) -> None:
            if case.again:
                checks.repeat(case, line)
            given = waiting.grad_output
            assert given is not None  # noqa: S101
            part = sample(waiting.api, case.kind, waiting.args, waiting.kwargs, given, case.rows, backward=True)
            if part is None or case.live.dtype is torch.float64:
                return
            own = _tensors((part.args, part.kwargs))[number]
            by_row = _tensors((waiting.args, waiting.kwargs))[number].shape == given.shape
            live = part.cut(case.live) if by_row else None
            if case.kind == "gemm" and part.batches:
                live = part.cut(case.live)
            if live is None and own.shape == case.live.shape and part.cut(given).shape == given.shape:
                live = case.live
            if live is None:
                return  # a sum over all rows, of which only some are computed
            case.terms = max(part.terms, given.shape[-1] if given.dim() else 1)
            values = twins.dtypes_asked(part.args, part.kwargs, twins.double)
            exact = case.run((*values, part.cut(given).double()), {})
            # What the forward has rounded to 16 bits is what its backward works with.
            by = torch.finfo(live.dtype).eps / 2 if live.dtype in HALF else 2 * WORKING

            def moved_by(x: torch.Tensor) -> torch.Tensor:
                return nudge(x, by)

            moved = (*twins.convert(values, moved_by), moved_by(part.cut(given).double()))
            nudged = case.run(moved, {})
            scrambled = case.run((*values, scramble(part.cut(given).double())), {})
            if exact.shape == live.shape:
                judge_rows(live, exact, nudged, case.kind, case.terms, line[REFERENCE], by, scrambled=scrambled)

        return check


def _edges(node: Any, inputs: list[torch.Tensor]) -> list[tuple[int, Any, int]]:
    """For each input that takes a gradient: its number, and the nodes and places through which the call hands it on.

    Empty if the call's part of the graph is not closed within a few nodes, so that no gradient is taken for whole that
    is not.
    """
    ends: dict[tuple[Any, int], int] = {}
    leaves: dict[int, int] = {}
    for number, x in enumerate(inputs):
        if x.requires_grad and x.is_floating_point():
            if x.grad_fn is not None:
                ends.setdefault((x.grad_fn, x.output_nr), number)
            else:
                leaves.setdefault(id(x), number)
    found: list[tuple[int, Any, int]] = []
    seen, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        for index, (target, slot) in enumerate(current.next_functions):
            if target is None:
                continue
            leaf = hasattr(target, "variable")
            end = leaves.get(id(target.variable)) if leaf else ends.get((target, slot))
            if end is not None:
                found.append((end, current, index))
            elif leaf:
                continue
            elif target not in seen:
                if len(seen) >= _MOST_NODES:
                    return []
                seen.add(target)
                waiting.append(target)
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    twins.convert(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found
