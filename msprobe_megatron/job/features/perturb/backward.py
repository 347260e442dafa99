"""The backward of a call: its vector-Jacobian product, computed again when the gradients pass, and compared with them.

During the forward only references are kept, of tensors that autograd keeps anyway. When the gradient of the result has
arrived and those of the inputs have been computed, the same product is computed again on detached inputs: as it is, and
on a few rows in 64 bits. A tensor that was written to or freed in between is skipped. Hooks stand on autograd nodes and
insert nothing into the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from msprobe_megatron.job.features.perturb.examiner import CheckRunner
from msprobe_megatron.job.features.perturb.judge import checks
from msprobe_megatron.job.features.perturb.judge.checks import CheckedCall, rows_of_gradient, whole_gradient
from msprobe_megatron.job.features.perturb.judge.tolerance import class_of
from msprobe_megatron.job.features.perturb.run.changed_inputs import convert, tensors_of
from msprobe_megatron.job.features.perturb.run.rerun import CannotRun, Guard, Refused
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.calls.rerunnable import Pass

_MOST_NODES = 32
# Gradients of a tensor that is passed more often are added in an unknown order.
_MOST_USES = 2
# Modes that compare with the exact gradient; all others use the check of the forward.
_EXACT = {"improve_precision": rows_of_gradient, "to_cpu": whole_gradient}


class _PendingCall:
    """A call whose gradients are awaited."""

    def __init__(self, api: str, name: str, in_step: int, where: Pass, function: Any, args: Any, kwargs: Any) -> None:
        self.api, self.name, self.in_step, self.where, self.function = api, name, in_step, where, function
        self.args, self.kwargs = convert(args, torch.Tensor.detach), convert(kwargs, torch.Tensor.detach)
        self.versions = [(x, x._version, x.shape) for x in tensors_of((args, kwargs))]
        # Memory that the call does not read may have been reused.
        self._unread = checks.ignored(api, args, kwargs)
        self._variables = [_variable(x) for x, _, _ in self.versions]
        self.grad_output: torch.Tensor | None = None
        self.missing = 0
        self.gradients: dict[int, torch.Tensor] = {}
        """By index of the tensor among the arguments."""

    def uses(self, number: int) -> set[int]:
        """Indices at which a tensor is passed: the gradient of `x * x` comes through two of them."""
        return {place for place, variable in enumerate(self._variables) if variable == self._variables[number]}

    def intact(self) -> bool:
        """Whether no tensor was written to or freed since the call."""
        return all(
            x.shape == shape and (x._version == version or id(x) in self._unread) for x, version, shape in self.versions
        )


class BackwardExaminer:
    """Sets hooks in the forward, examines in the backward."""

    def __init__(self, runner: CheckRunner) -> None:
        self._runner, self._config = runner, runner.config
        self._round = 0

    def restart(self) -> None:
        """Ignore gradients of calls that were made before this."""
        self._round += 1

    def watch(
        self, api: str, name: str, in_step: int, where: Pass, function: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Await the gradients of a call that has just been made."""
        if not isinstance(result, torch.Tensor) or result.grad_fn is None or not result.is_floating_point():
            return
        inputs = tensors_of((args, kwargs))
        edges = _edges(result.grad_fn, inputs)
        if not edges:
            return
        pending = _PendingCall(api, name, in_step, where, function, args, kwargs)
        this_round, slot = self._round, result.output_nr
        by_node: dict[Any, list[tuple[int, int]]] = {}
        for number, node, index in edges:
            by_node.setdefault(node, []).append((number, index))
        pending.missing = len(by_node)

        def arrived(grad_outputs: Any) -> None:
            if self._round == this_round:
                pending.grad_output = grad_outputs[slot]

        result.grad_fn.register_prehook(arrived)
        for node, wanted in by_node.items():
            node.register_hook(self._passed(pending, wanted, this_round))

    def _passed(
        self, pending: _PendingCall, wanted: list[tuple[int, int]], this_round: int
    ) -> Callable[[Any, Any], None]:
        def hook(grad_inputs: Any, grad_outputs: Any) -> None:
            if self._round != this_round:
                return
            try:
                with untraced(), torch.no_grad():
                    for number, index in wanted:
                        gradient = grad_inputs[index]
                        if gradient is not None:
                            before = pending.gradients.get(number)
                            pending.gradients[number] = gradient if before is None else before + gradient
                    pending.missing -= 1
                    if not pending.missing and pending.grad_output is not None:
                        self._examine(pending)
            except Exception as error:
                self._runner.fault(error, f"examination of the backward of {pending.name}")

        return hook

    def _examine(self, pending: _PendingCall) -> None:
        if not pending.intact():
            return
        given, kind = pending.grad_output, class_of(pending.api)
        where = pending.where._replace(phase="backward")
        for number, live in pending.gradients.items():
            if len(pending.uses(number)) > _MOST_USES:
                continue
            call = CheckedCall(
                pending.api,
                kind,
                (pending.args, pending.kwargs, given),
                {},
                live,
                lambda result: result,
                self._product(pending, number),
                rows=self._config.rows,
                ulps=self._config.ulps,
                stage="backward",
                again=self._runner.repeats_whole(pending.name),
                numbering=lambda x: self._runner.numbering_of(pending.where, x, kind),
                forward=self._forward(pending),
            )
            exact = _EXACT.get(self._config.mode) if self._runner.profile == "ulp" else None
            check = None if exact is None else exact(number)
            self._runner.examine(call, pending.name, pending.in_step, where, str(number), check)

    def _forward(self, pending: _PendingCall) -> checks.Run:
        """The call itself, run again."""

        def run(some: tuple[Any, ...], more: dict[str, Any]) -> Any:
            watch = not pending.api.startswith("torch.")
            return self._runner.rerun.run(pending.function, some, more, watch=watch)

        return run

    def _product(self, pending: _PendingCall, number: int) -> checks.Run:
        """The vector-Jacobian product with respect to one tensor, as a function of inputs and gradient."""
        uses = pending.uses(number)

        def run(some: tuple[Any, ...], more: dict[str, Any]) -> torch.Tensor:
            args, kwargs, given = some

            def forward(*values: Any) -> torch.Tensor:
                position = iter(range(1 << 30))
                leaves: list[torch.Tensor] = []

                def leaf(x: torch.Tensor) -> torch.Tensor:
                    x = x.detach()
                    if next(position) not in uses:
                        return x
                    leaves.append(leaves[0] if leaves else x.requires_grad_())
                    return leaves[0]

                with torch.enable_grad():
                    result = pending.function(*convert(values[0], leaf), **convert(values[1], leaf))
                    gradient = values[2].to(device=result.device, dtype=result.dtype).reshape(result.shape)
                    return torch.autograd.grad(result, leaves[0], gradient)[0]

            try:
                if not pending.api.startswith("torch."):
                    with Guard():
                        return forward(args, kwargs, given)
                self._runner.rerun.prove(pending.function, args, kwargs)
                return forward(args, kwargs, given)
            except (Refused, CannotRun):
                raise
            except Exception as error:
                raise CannotRun(f"{type(error).__name__}: {str(error)[:160]}") from error

        return run


def _edges(node: Any, inputs: list[torch.Tensor]) -> list[tuple[int, Any, int]]:
    """For each input that gets a gradient: its index, and the nodes and slots through which the call passes it on.

    Empty if the call's part of the graph has too many nodes, so that a partial gradient is never taken for the whole.
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
    """A key that is equal for two tensors that autograd takes for the same variable."""
    return id(x) if x.grad_fn is None else (x.grad_fn, x.output_nr)
