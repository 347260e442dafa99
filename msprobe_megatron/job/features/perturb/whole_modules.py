"""Whole modules under examination: a norm, a router, the core of attention, each as one operator.

Where a module makes several calls, each of them may be right and the module wrong: a variance as the difference of two
large numbers is the textbook case. The module is run again with its parameters and inputs in the next precision, and on
inputs that were nudged, whose answer says how much this computation may lose; and once more as it is. Always under the
guard: a module that communicates, draws or writes is left alone from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from msprobe_megatron.probes.perturb import checks, noise, reference, twins
from msprobe_megatron.probes.perturb.checks import Case
from msprobe_megatron.probes.perturb.classes import HALF
from msprobe_megatron.probes.perturb.examiner import Examiner, outputs
from msprobe_megatron.probes.perturb.figures import PLACE, REFERENCE
from msprobe_megatron.probes.perturb.rerun import Rerunner, hooks_off
from msprobe_megatron.probes.perturb.safety import CannotRun

# Composite modules of Megatron that neither communicate nor draw where dropout is off.
_KNOWN = ("core_attention", "router")
_SUM = PLACE["input_sum"]
_own_work = torch._C.DisableTorchFunction


def examinable(name: str, module: nn.Module) -> bool:
    """Whether a module is examined when nothing is named: one without children that is not a single call of torch's.

    Example::

        examinable("decoder.layers.0.input_layernorm", torch.nn.LayerNorm(4))      # False: one call of torch
    """
    if name.rpartition(".")[2] in _KNOWN:
        return True
    if type(module).__module__.startswith("torch.nn.") or next(module.children(), None) is not None:
        return False
    return type(module).__name__ not in ("IdentityOp", "IdentityFuncOp", "ColumnParallelLinear", "RowParallelLinear")


class ModuleExaminer:
    """Examines modules through forward hooks.

    Example::

        modules = ModuleExaminer(examiner)
        handle = modules.watch("decoder.layers.0.input_layernorm", norm, chunk=0)
    """

    def __init__(self, examiner: Examiner) -> None:
        self._examiner, self._asked = examiner, examiner.asked
        self._rerun = Rerunner()
        self._left_alone: dict[str, str] = {}
        self._check = self._precision if examiner.profile == "ulp" else checks.as_msprobe(self._asked.mode)
        if examiner.profile == "ulp" and self._asked.mode not in ("improve_precision", "to_cpu"):
            self._check = checks.ULP[self._asked.mode]
        self.numberings: dict[str, Callable[[torch.Tensor], noise.Numbering | None]] = {}

    def watch(self, name: str, module: nn.Module, now: Callable[[], Any]) -> Any:
        """Set the hook; `now` gives the pass in which a call is made, or None if it is not wanted."""

        # A hook that is taken away while torch walks over the hooks is still called, then without the kwargs.
        def hook(_: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> None:
            where = now() if len(kwargs_and_output) > 1 else None
            if where is None or name in self._left_alone:
                return
            try:
                with _own_work(), torch.no_grad():
                    self._examine(name, module, where, args, *kwargs_and_output)
            except Exception as error:
                self._examiner._fault(error, f"examination of {name}")

        return module.register_forward_hook(hook, with_kwargs=True)

    def _examine(self, name: str, module: nn.Module, where: Any, args: Any, kwargs: Any, output: Any) -> None:
        refused, found = Counter(self._rerun.refusals), len(self._examiner.found)
        op = type(module).__name__
        for path, live, pick in outputs(output):
            change = self._change(live.dtype)

            def run(some: tuple[Any, ...], more: dict[str, Any], change: twins.Change | None = change) -> Any:
                with hooks_off(module):
                    if some is args or change is None:
                        return self._rerun.run(module.forward, some, more, watch=True)
                    return self._rerun.run(twins.module_twin(module, change), some, more, watch=True)

            case = Case(op, "module", args, kwargs, live, pick, run, 0, self._asked.ulps, self._asked.stage)
            case.parameters = tuple(p for p in module.parameters() if p.is_floating_point())
            case.numbering = self.numberings.get(name, case.numbering)
            self._examiner.examine(case, name, 0, where, path, check=self._check)
        if len(self._examiner.found) == found:
            why = next(iter(self._rerun.refusals - refused), self._examiner.reasons.get(op))
            if why is not None:
                self._left_alone[name] = why

    def _change(self, low: torch.dtype) -> twins.Change | None:
        """What becomes of the parameters in the second run; None where only its inputs change."""
        if self._asked.mode not in ("improve_precision", "to_cpu"):
            return None
        if self._examiner.profile == "msprobe":
            return twins.single if self._asked.mode == "improve_precision" else twins.on_host
        return _to(twins.higher(low))

    def _precision(self, case: Case, line: torch.Tensor) -> None:
        checks.repeat(case, line)
        for parameter in case.parameters:
            line[_SUM] += parameter.detach().sum(dtype=torch.float32)
        low = case.live.dtype
        if low not in (*HALF, torch.float32):
            return
        high = twins.higher(low)
        # What is kept in 16 bits between the calls of a module loses that much at each of them.
        nudge = torch.finfo(low).eps / 4 if low in HALF else reference.WORKING

        def moved(x: torch.Tensor) -> torch.Tensor:
            return reference.nudge(x.double(), nudge).to(high) if x.dtype is high else x

        args, kwargs = twins.convert(case.args, _to(high)), twins.convert(case.kwargs, _to(high))
        exact = case.pick(case.run(args, kwargs))
        if exact.dtype is low:
            raise CannotRun(f"it computes in {low} whatever it is given")
        nudged = case.pick(case.run(twins.convert(args, moved), twins.convert(kwargs, moved)))
        exact, nudged = exact.double(), nudged.double()
        reference.judge_rows(case.live, exact, nudged, case.kind, 1, line[REFERENCE], nudge)

    def left_alone(self) -> dict[str, str]:
        """Modules that communicate, draw, write, or cannot be run in another precision, and which of these."""
        return self._left_alone


def _to(high: torch.dtype) -> twins.Change:
    return lambda x: x.to(high) if x.is_floating_point() else x
