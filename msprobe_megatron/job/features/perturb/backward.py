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
from msprobe_megatron.probes.perturb.classes import class_of
from msprobe_megatron.probes.perturb.examiner import Examiner
from msprobe_megatron.probes.perturb.gradient_reference import rows_of_gradient, whole_gradient
from msprobe_megatron.probes.perturb.safety import CannotRun, Guard, Refused

_MOST_NODES = 32
# Gradients of a tensor that stands in more places are added in an order that is not known.
_MOST_PLACES = 2
_own_work = torch._C.DisableTorchFunction
# Modes that compare with the exact gradient; the others do in backward what they do in forward.
_EXACT = {"improve_precision": rows_of_gradient, "to_cpu": whole_gradient}


class _Waiting:
    """A call whose gradients are awaited."""

    def __init__(self, api: str, name: str, in_step: int, where: Any, function: Any, args: Any, kwargs: Any) -> None:
        self.api, self.name, self.in_step, self.where, self.function = api, name, in_step, where, function
        self.args, self.kwargs = twins.convert(args, torch.Tensor.detach), twins.convert(kwargs, torch.Tensor.detach)
        self.versions = [(x, x._version, x.shape) for x in twins.tensors_of((args, kwargs))]
        # Memory that a call does not read may be another's by now.
        self._unread = checks.ignored(args, kwargs)
        self._variables = [_variable(x) for x, _, _ in self.versions]
        self.grad_output: torch.Tensor | None = None
        self.missing = 0
        self.gradients: dict[int, torch.Tensor] = {}
        """By number of the tensor among the arguments."""

    def places(self, number: int) -> set[int]:
        """Where a tensor stands among the arguments: the gradient of `x * x` comes through two of them."""
        return {place for place, variable in enumerate(self._variables) if variable == self._variables[number]}

    def intact(self) -> bool:
        return all(
            x.shape == shape and (x._version == version or x is self._unread) for x, version, shape in self.versions
        )


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
        inputs = twins.tensors_of((args, kwargs))
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
            if len(waiting.places(number)) > _MOST_PLACES:
                continue
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
                lambda x: self._examiner.number(waiting.where, x, class_of(waiting.api)),
                forward=self._forward(waiting),
            )
            check = _EXACT.get(self._asked.mode) if self._examiner.profile == "ulp" else None
            self._examiner.examine(
                case, waiting.name, waiting.in_step, where, str(number), None if check is None else check(number)
            )

    def _forward(self, waiting: _Waiting) -> checks.Run:
        """The call itself, once more."""

        def run(some: tuple[Any, ...], more: dict[str, Any]) -> Any:
            watch = not waiting.api.startswith("torch.")
            return self._examiner.rerun.run(waiting.function, some, more, watch=watch)

        return run

    def _product(self, waiting: _Waiting, number: int) -> checks.Run:
        """The vector-Jacobian product with respect to one of the tensors, as a function of inputs and gradient."""
        places = waiting.places(number)

        def run(some: tuple[Any, ...], more: dict[str, Any]) -> torch.Tensor:
            args, kwargs, given = some

            def forward(*values: Any) -> torch.Tensor:
                position = iter(range(1 << 30))
                leaves: list[torch.Tensor] = []

                def leaf(x: torch.Tensor) -> torch.Tensor:
                    x = x.detach()
                    if next(position) not in places:
                        return x
                    leaves.append(leaves[0] if leaves else x.requires_grad_())
                    return leaves[0]

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


def _variable(x: torch.Tensor) -> Any:
    """The same for two tensors that autograd takes for one."""
    return id(x) if x.grad_fn is None else (x.grad_fn, x.output_nr)
