"""The probe: receives calls from the site, examines or replaces them, and keeps the results of the examinations.

`Examiner` decides what is done with a call; `CheckRunner` runs the checks, also for whole modules and for the backward.
Results are a list of `Examined` with lines of statistics that stay on the device; verdicts come later, in the writer
thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from msprobe_megatron.config import PerturbConfig
from msprobe_megatron.job.clock import Clock, Moment
from msprobe_megatron.job.features.perturb.fix import fixed
from msprobe_megatron.job.features.perturb.judge import checks
from msprobe_megatron.job.features.perturb.judge.checks import CheckedCall
from msprobe_megatron.job.features.perturb.judge.tolerance import class_of
from msprobe_megatron.job.features.perturb.judge.verdict import Examined, PreheatSchedule, StatisticsTable
from msprobe_megatron.job.features.perturb.run.changed_inputs import Numbering
from msprobe_megatron.job.features.perturb.run.rerun import CannotRun, Refused, Rerunner
from msprobe_megatron.job.features.perturb.select.selecting import Selection, StepPlan, call_name
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.calls.rerunnable import Pass

if TYPE_CHECKING:
    from msprobe_megatron.job.features.perturb.backward import BackwardExaminer

_PLAIN = (torch.Tensor, nn.Parameter)
Fault = Callable[[BaseException, str], None]
NumberingOf = Callable[[Pass, torch.Tensor, str], Numbering | None]
"""Which elements of the whole a tensor holds that a call of a class gets in a pass of a module; None: unknown."""


class CheckRunner:
    """Runs the check of the configured mode on calls, and keeps the results until they are written.

    `max_rows` results may wait for the next file.
    """

    def __init__(
        self,
        config: PerturbConfig,
        clock: Clock,
        table: StatisticsTable,
        fault: Fault,
        numbering_of: NumberingOf,
        max_rows: int,
    ) -> None:
        self.config, self._clock, self._table, self.fault = config, clock, table, fault
        self.numbering_of, self._max_rows = numbering_of, max_rows
        self.profile = "msprobe" if config.preheat else config.profile
        self._check = checks.ULP[config.mode] if self.profile == "ulp" else checks.as_msprobe(config.mode)
        self.preheat = PreheatSchedule(config.preheat_steps, config.max_samples) if config.preheat else None
        self.rerun = Rerunner()
        self.plan = StepPlan()
        self.found: list[Examined] = []
        self.failures: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}

    def begin(self, plan: StepPlan) -> None:
        """Start a step."""
        self.plan = plan
        if self.preheat is not None:
            self.preheat.begin()

    def repeats_whole(self, name: str) -> bool:
        """Whether there is time to repeat all of this call in this step."""
        return name not in self.plan.rows_only

    def examine(
        self, call: CheckedCall, name: str, in_step: int, where: Pass, path: str, check: checks.Check | None = None
    ) -> None:
        """Run the check of the mode, or another one, and keep the result."""
        if len(self.found) >= self._max_rows:
            self.failures["no room"] += 1
            self.reasons["no room"] = "limits.host_memory is too small for so many rows between two files"
            return
        generation = self._table.generation
        number, line = self._table.take()
        try:
            (check or self._check)(call, line)
            if self.preheat is not None and self.preheat.learning:
                checks.on_host(call, line)
        except Refused:
            return
        except CannotRun as error:
            self.failures[call.api] += 1
            self.reasons.setdefault(call.api, str(error))
            return
        except RuntimeError as error:
            if call.live.is_cpu:
                raise
            # A device that lacks the operators of the judgement (float64 on an NPU), or memory for it.
            self.failures[call.api] += 1
            self.reasons.setdefault(call.api, f"{type(error).__name__}: {str(error)[:160]}")
            return
        examined = Examined(
            line=number,
            step=self._clock.step,
            seq=self._clock.tick(),
            name=name,
            api=call.api,
            number=in_step,
            chunk=where.chunk,
            phase=where.phase,
            microbatch=where.moment.microbatch,
            path=path,
            kind=call.kind,
            terms=call.terms,
            dtype=str(call.live.dtype).removeprefix("torch."),
            shape=tuple(call.live.shape),
            mode=self.config.mode,
            stage=self.config.stage,
            profile=self.profile,
            note=call.note,
        )
        with self._table.lock:
            # Another host thread may have sealed the table meanwhile: then the line is lost.
            if generation == self._table.generation:
                self.found.append(examined)

    def note_outlier(self, name: str, api: str, note: str) -> None:
        """Keep a result that needs no statistics: a call with another constant than the other layers."""
        examined = Examined(
            line=-1,
            step=self._clock.step,
            seq=self._clock.tick(),
            name=name,
            api=api,
            number=0,
            chunk=0,
            phase="forward",
            microbatch=0,
            path="",
            kind=class_of(api),
            terms=1,
            dtype="",
            shape=(),
            mode=self.config.mode,
            stage=self.config.stage,
            profile=self.profile,
            verdict="odd",
            note=note,
        )
        self.found.append(examined)

    def take(self) -> tuple[list[Examined], Callable[[], Any]] | None:
        """Hand over all results, with a function that waits for their statistics; None if there are none."""
        with self._table.lock:
            if not self.found:
                return None
            found, self.found = self.found, []
            return found, self._table.seal()


class Examiner:
    """Handles the calls of one job: examines, observes or replaces those that the plan of the step selects."""

    def __init__(self, runner: CheckRunner, selection: Selection, backward: BackwardExaminer | None) -> None:
        self._runner, self._selection, self._backward = runner, selection, backward
        self._config = runner.config
        self._callers: set[str] = set()
        self._replaced: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._selected: dict[tuple[str, str, int], bool] = {}

    def begin(self, plan: StepPlan) -> None:
        """Start a step."""
        self._counts.clear()
        self._runner.begin(plan)

    def callers(self) -> frozenset[str]:
        """Modules that have made a selected call so far."""
        return frozenset(self._callers.copy())  # other host threads may add to it

    def wants(self, module: str, phase: str, moment: Moment) -> bool:
        """Whether the calls of a module are to be handed over in this pass; not those of a recomputed forward."""
        if self._config.stage == "forward" and self._config.handler == "check" and phase != "forward":
            return False
        microbatch = self._runner.plan.microbatch
        if microbatch is not None and moment.microbatch != microbatch:
            return False
        return self._selection.place(module, moment.microbatch)

    def call(
        self, api: str, number: int, where: Pass, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a call that the site hands over; returns its result."""
        try:
            chosen = self._choose(api, number, where, function, kwargs)
        except Exception as error:
            self._runner.fault(error, f"choice of {api}")
            chosen = None
        if chosen is None:
            return function(*args, **kwargs)
        name, in_step = chosen
        if self._config.handler == "fix":
            return self._fix(api, function, args, kwargs)
        return self._examine(api, name, in_step, where, function, args, kwargs)

    def _choose(self, api: str, number: int, where: Pass, function: Any, kwargs: Any) -> tuple[str, int] | None:
        """Name of a call to examine or fix, and how often its API was called before in the step; None: neither."""
        in_step = self._counts[api]
        self._counts[api] = in_step + 1
        module = f"{where.module}/backward" if where.phase == "backward" else where.module
        calls = self._runner.plan.calls
        if calls is not None and call_name(module, api, number) not in calls:
            return None
        if not self._is_selected(module, api, number, in_step):
            return None
        self._callers.add(where.module)
        if self._runner.rerun.refusal(function, api, kwargs) is not None:
            return None
        preheat = self._runner.preheat
        if preheat is not None and not preheat.chooses(api) and preheat.learning:
            return None  # there is no threshold yet to judge it by
        return call_name(module, api, number), in_step

    def _is_selected(self, module: str, api: str, number: int, in_step: int) -> bool:
        key = (module, api, number)
        # A scope may name calls by their number in the step, which changes with the data.
        if self._config.scope or key not in self._selected:
            self._selected[key] = self._selection.call(module, api, number, in_step)
        return self._selected[key]

    def _fix(self, api: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _has_float((*args, *kwargs.values())):
            return function(*args, **kwargs)
        self._replaced[api] += 1
        return fixed(function, args, kwargs, self._config.mode, self._config.stage)

    def _examine(
        self, api: str, name: str, in_step: int, where: Pass, function: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        result = function(*args, **kwargs)
        if not _has_float((*args, *kwargs.values())):
            return result
        plan = self._runner.plan
        try:
            with untraced(), torch.no_grad():
                if plan.survey is not None:
                    microbatch = where.moment.microbatch
                    plan.survey.add(name, api, where.phase, microbatch, args, kwargs, result)
                if not plan.examine:
                    pass
                elif self._config.stage == "forward" or where.phase == "backward":
                    self._each_output(api, name, in_step, where, function, args, kwargs, result)
                elif self._backward is not None:
                    self._backward.watch(api, name, in_step, where, function, args, kwargs, result)
        except Exception as error:
            self._runner.fault(error, f"examination of {name}")
        return result

    def _each_output(
        self, api: str, name: str, in_step: int, where: Pass, function: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        runner, kind = self._runner, class_of(api)

        def run(some: tuple[Any, ...], more: dict[str, Any]) -> Any:
            return runner.rerun.run(function, some, more, watch=not api.startswith("torch."))

        found = outputs(result)
        shared: dict[Any, Any] | None = {} if len(found) > 1 else None
        for path, live, pick in found:
            call = CheckedCall(
                api,
                kind,
                args,
                kwargs,
                live,
                pick,
                run,
                rows=self._config.rows,
                ulps=self._config.ulps,
                stage=self._config.stage,
                again=runner.repeats_whole(name),
                numbering=lambda x: runner.numbering_of(where, x, kind),
                shared=shared,
            )
            runner.examine(call, name, in_step, where, path)

    def ledger(self) -> dict[str, Any]:
        """Calls that were refused, that could not be run, or that were replaced."""
        runner = self._runner
        return {
            "never_run_twice": dict(runner.rerun.refusals),
            "could_not_run": {api: [count, runner.reasons[api]] for api, count in runner.failures.items()},
            "replaced": dict(self._replaced),
            "unmatched": self._selection.unmatched(),
        }


def outputs(result: Any) -> list[tuple[str, torch.Tensor, Callable[[Any], torch.Tensor]]]:
    """Floating-point tensors of a result: path, tensor, and a function that extracts it from a similar result."""
    if isinstance(result, torch.Tensor):
        return [("", result, _itself)] if result.is_floating_point() and type(result) in _PLAIN else []
    if not isinstance(result, list | tuple):
        return []
    return [
        (str(index), item, lambda other, index=index: other[index])  # type: ignore[misc]
        for index, item in enumerate(result)
        if isinstance(item, torch.Tensor) and item.is_floating_point() and type(item) in _PLAIN
    ]


def _itself(result: Any) -> torch.Tensor:
    found: torch.Tensor = result
    return found


def _has_float(values: tuple[Any, ...]) -> bool:
    """Whether the arguments have a floating-point tensor and no tensor subclass (DTensor and others)."""
    found = False
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value) not in _PLAIN:
                return False
            found = found or value.is_floating_point()
        elif isinstance(value, list | tuple):
            found = found or _has_float(tuple(value))
    return found
