"""The probe: is handed calls by the site, runs them, examines or replaces them, and keeps what it found.

The only reader of the `perturb` section during a step. What it finds is a list of `Examined` with lines of figures that
stay on the device; the words come later, in the writer thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from msprobe_megatron.clock import Clock, Moment
from msprobe_megatron.config import PerturbConfig
from msprobe_megatron.probes.perturb import checks
from msprobe_megatron.probes.perturb.checks import Case
from msprobe_megatron.probes.perturb.classes import class_of
from msprobe_megatron.probes.perturb.figures import Figures
from msprobe_megatron.probes.perturb.fix import fixed
from msprobe_megatron.probes.perturb.noise import Numbering
from msprobe_megatron.probes.perturb.preheat import Walk
from msprobe_megatron.probes.perturb.rerun import Rerunner
from msprobe_megatron.probes.perturb.safety import CannotRun, Refused
from msprobe_megatron.probes.perturb.selecting import Selection, call_name
from msprobe_megatron.probes.perturb.verdict import Examined

_PLAIN = (torch.Tensor, nn.Parameter)
_own_work = torch._C.DisableTorchFunction
Fault = Callable[[BaseException, str], None]


class Examiner:
    """Examines what `asked` means.

    Example::

        examiner = Examiner(config.perturb, clock, figures, fault)
        site = CallSite(chunks, clock, fault, examiner)
    """

    def __init__(self, asked: PerturbConfig, clock: Clock, figures: Figures, fault: Fault) -> None:
        self.asked, self._clock, self._figures, self._fault = asked, clock, figures, fault
        self.selection = Selection(asked)
        self.rerun = Rerunner()
        self.walk = Walk(asked.preheat_steps, asked.max_samples) if asked.preheat else None
        self.profile = "msprobe" if asked.preheat else asked.profile
        self._check = checks.ULP[asked.mode] if self.profile == "ulp" else checks.as_msprobe(asked.mode)
        self.chosen: frozenset[str] | None = None
        self.microbatch: int | None = None
        self.whole_again: Callable[[str], bool] = lambda name: True
        self.observe: Callable[[str, Any, str, tuple[Any, ...], dict[str, Any], Any], None] | None = None
        self.constants: Callable[[str, str, tuple[Any, ...], dict[str, Any]], None] | None = None
        self.watch_gradients: Callable[..., None] | None = None
        self.number: Callable[[Any, torch.Tensor, str], Numbering | None] = lambda where, x, kind: None
        """Which elements of the whole a tensor holds that a call of this class is given in a pass of a module."""
        self.makers: set[str] = set()
        """Modules that have made a call that is meant."""
        self.most = 1 << 17
        """Rows that may wait for the next file."""
        self.found: list[Examined] = []
        self.cannot: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        self.replaced: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._asked_for: dict[tuple[str, str, int], bool] = {}

    def begin(self) -> None:
        """A step begins."""
        self._counts.clear()
        if self.walk is not None:
            self.walk.begin()

    def wants(self, module: str, phase: str, moment: Moment) -> bool:
        """Whether the calls of a module are to be handed over in this pass: a recomputed forward is not."""
        if self.asked.stage == "forward" and self.asked.handler == "check" and phase != "forward":
            return False
        if self.microbatch is not None and moment.microbatch != self.microbatch:
            return False
        return self.selection.place(module, moment.microbatch)

    def call(
        self, api: str, number: int, where: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a call that the site hands over."""
        try:
            chosen = self._choice(api, number, where, function, kwargs)
        except Exception as error:
            self._fault(error, f"choice of {api}")
            chosen = None
        if chosen is None:
            return function(*args, **kwargs)
        name, in_step = chosen
        if self.asked.handler == "fix":
            return self._fix(api, name, function, args, kwargs)
        return self._examine(api, name, in_step, where, function, args, kwargs)

    def _choice(self, api: str, number: int, where: Any, function: Any, kwargs: Any) -> tuple[str, int] | None:
        """Name of a call that is to be examined or fixed, and how often its API was called before in the step."""
        module = where.module
        in_step = self._counts[api]
        self._counts[api] = in_step + 1
        if where.phase == "backward":
            module = f"{module}/backward"
        name = None
        if self.chosen is None or (name := call_name(module, api, number)) in self.chosen:
            meant = self.asked.scope or (module, api, number) not in self._asked_for
            if meant:
                self._asked_for[module, api, number] = self.selection.call(module, api, number, in_step)
            if self._asked_for[module, api, number]:
                self.makers.add(where.module)
            if self._asked_for[module, api, number] and self.rerun.refusal(function, api, kwargs) is None:
                name = name or call_name(module, api, number)
                if self.walk is not None and not self.walk.takes(api) and self.walk.learning:
                    return None  # not its turn: there is no threshold yet to judge it by
                return name, in_step
        return None

    def _fix(self, api: str, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _has_float((*args, *kwargs.values())):
            return function(*args, **kwargs)
        self.replaced[api] += 1
        return fixed(function, args, kwargs, self.asked.mode, self.asked.stage)

    def _examine(
        self, api: str, name: str, in_step: int, where: Any, function: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        result = function(*args, **kwargs)
        if not _has_float((*args, *kwargs.values())):
            return result
        try:
            with _own_work(), torch.no_grad():
                if self.constants is not None and where.phase == "forward":
                    self.constants(name, api, args, kwargs)
                if self.observe is not None:
                    if self.asked.stage == "forward" or where.phase == "backward" or _has_node(result):
                        self.observe(name, where, api, args, kwargs, result)
                elif self.asked.stage == "forward" or where.phase == "backward":
                    self._each_output(api, name, in_step, where, function, args, kwargs, result)
                elif self.watch_gradients is not None:
                    self.watch_gradients(api, name, in_step, where, function, args, kwargs, result)
        except Exception as error:
            self._fault(error, f"examination of {name}")
        return result

    def _each_output(
        self, api: str, name: str, in_step: int, where: Any, function: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        def run(some: tuple[Any, ...], more: dict[str, Any]) -> Any:
            return self.rerun.run(function, some, more, watch=not api.startswith("torch."))

        for path, live, pick in outputs(result):
            case = Case(
                api, class_of(api), args, kwargs, live, pick, run, self.asked.rows, self.asked.ulps, self.asked.stage,
                again=self.whole_again(name), numbering=lambda x: self.number(where, x, class_of(api)),
            )  # fmt: skip
            self.examine(case, name, in_step, where, path)

    def examine(
        self, case: Case, name: str, in_step: int, where: Any, path: str, check: checks.Check | None = None
    ) -> None:
        """Put a case through the check of the mode (or another one) and keep what is known of it."""
        if len(self.found) >= self.most:
            self.cannot["no room"] += 1
            self.reasons["no room"] = "limits.host_memory is too small for so many rows between two files"
            return
        turn = self._figures.turn
        number, line = self._figures.take()
        try:
            (check or self._check)(case, line)
            if self.walk is not None and self.walk.learning:
                checks.on_host(case, line)
        except Refused:
            return
        except CannotRun as error:
            self.note_cannot(case.api, error)
            return
        live = case.live
        seen = Examined(
            number,
            self._clock.step,
            self._clock.tick(),
            name,
            case.api,
            in_step,
            where.chunk,
            where.phase,
            where.moment.microbatch,
            path,
            case.kind,
            case.terms,
            str(live.dtype).removeprefix("torch."),
            tuple(live.shape),
            self.asked.mode,
            self.asked.stage,
            self.profile,
        )  # fmt: skip
        with self._figures.changing:
            # A thread of the host may come when the figures were handed over: then nobody knows what it found.
            if turn == self._figures.turn:
                self.found.append(seen)

    def note_cannot(self, api: str, error: BaseException) -> None:
        """Count a call that could not be run otherwise, with the first reason."""
        self.cannot[api] += 1
        self.reasons.setdefault(api, str(error))

    def ledger(self) -> dict[str, Any]:
        """What was refused, could not be run, or was replaced."""
        return {
            "never_run_twice": dict(self.rerun.refusals),
            "could_not_run": {api: [count, self.reasons[api]] for api, count in self.cannot.items()},
            "replaced": dict(self.replaced),
            "unmatched": self.selection.unmatched(),
        }


def outputs(result: Any) -> list[tuple[str, torch.Tensor, Callable[[Any], torch.Tensor]]]:
    """Floating tensors of a result: where they stand, and how to find them in another result of the same form.

    Example::

        [(path, live.shape) for path, live, pick in outputs(torch.topk(x, 2))]      # [('0', …)]
    """
    if isinstance(result, torch.Tensor):
        return [("", result, _itself)] if result.is_floating_point() and type(result) in _PLAIN else []
    if not isinstance(result, list | tuple):
        return []
    return [
        (str(index), item, lambda other, index=index: other[index])  # type: ignore[misc]
        for index, item in enumerate(result)
        if isinstance(item, torch.Tensor) and item.is_floating_point() and type(item) in _PLAIN
    ]


def _has_node(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.grad_fn is not None


def _itself(result: Any) -> torch.Tensor:
    found: torch.Tensor = result
    return found


def _has_float(values: tuple[Any, ...]) -> bool:
    """Whether there is a floating tensor among the arguments, and none of a class of its own (DTensor and others)."""
    found = False
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value) not in _PLAIN:
                return False
            found = found or value.is_floating_point()
        elif isinstance(value, list | tuple):
            found = found or _has_float(tuple(value))
    return found
