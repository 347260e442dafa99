"""The perturb feature: runs operators again, or otherwise, and reports those whose results do not hold up.

With a budget the first step is a survey, which learns the calls and their costs; each step after it examines a few
calls, in the modules that make them. The path of a call:

    CallSite -> Examiner.call -> CheckRunner.examine -> a check of judge/checks -> a line of statistics on the device
    finish -> PerturbBatch -> (writer thread) Judge.verdicts -> rows of kind perturb, and one line per suspect
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.config import PerturbConfig
from msprobe_megatron.job import devices
from msprobe_megatron.job.clock import Moment
from msprobe_megatron.job.features.feature import Feature, JobContext, Seen, missing_steps
from msprobe_megatron.job.features.perturb.backward import BackwardExaminer
from msprobe_megatron.job.features.perturb.examiner import CheckRunner, Examiner
from msprobe_megatron.job.features.perturb.judge.verdict import Examined, Judge, StatisticsTable, row_of
from msprobe_megatron.job.features.perturb.modules import ModuleTargets, Numberings
from msprobe_megatron.job.features.perturb.select.selecting import Schedule, Selection, StepPlan, Survey
from msprobe_megatron.job.record.perturb import PerturbBatch
from msprobe_megatron.job.sites.calls.rerunnable import CallSite
from msprobe_megatron.run_directory.schema import Row

_STEPS_PER_FILE = 100
_SECONDS_PER_FILE = 30.0
_ROWS_PER_FILE = 2000
_ROW_BYTES = 8192
# Named calls are searched in all modules in the first step and every so many steps, else only where they were found.
_SEARCH_EVERY = 50
_MOST_LINES = 10


class PerturbFeature(Feature):
    """The `perturb` section of the probe file, bound to a model."""

    name = "perturb"

    def __init__(self, job: JobContext, config: PerturbConfig) -> None:
        self.config, self._job = config, job
        self.steps: list[int] = []
        device = devices.select()
        self._selection = Selection(config)
        numberings = Numberings(job)
        table = StatisticsTable(device.device, device.float_dtype, device.to_host)
        max_rows = max(_ROWS_PER_FILE, job.config.limits.host_memory // _ROW_BYTES)
        self._runner = CheckRunner(config, job.clock, table, job.fault, numberings.of_call, max_rows)
        in_backward = config.stage == "backward" and config.handler == "check"
        self._backward = BackwardExaminer(self._runner) if in_backward else None
        self._examiner = Examiner(self._runner, self._selection, self._backward)
        self._calls = CallSite(job.chunks, job.clock, job.fault, self._examiner, in_backward=in_backward)
        self._targets = ModuleTargets(job, self._runner, self._selection, numberings)
        self._survey = Survey(device.name, config.stage, costs=config.share < 1)
        self._schedule: Schedule | None = None
        self._ordinal = 0
        self._judge = Judge(preheat=config.preheat)
        self._reported: set[str] = set()
        self._pending, self._submitted = 0, time.monotonic()
        self._handed_over = 0

    def next_from(self, step: int) -> int | None:
        """The first step from `step` on that `steps` of the probe file selects."""
        return self._job.config.steps.next_from(step)

    def describe(self) -> str:
        """What is examined in which steps."""
        config = self.config
        what = ", ".join((*config.list, *config.scope, *config.modules)) or "the whole network"
        return f"perturb: {config.handler} {config.stage} of {what} at steps {self._job.config.steps.describe()}"

    def begin(self) -> None:
        """Plan the step and set the hooks."""
        plan = self._plan()
        self._examiner.begin(plan)
        if self._backward is not None:
            self._backward.restart()
        if self.config.list or self.config.scope or self.config.whole:
            self._calls.install(plan.modules)
        if plan.examine:
            self._targets.install(plan.calls)

    def _plan(self) -> StepPlan:
        """The plan of the coming step: survey, a step of the schedule, or all selected calls."""
        check = self.config.handler == "check"
        if check and self._ordinal == 0:
            return StepPlan(survey=self._survey, examine=self.config.share >= 1)
        if self._schedule is not None:
            return self._schedule.step(self._ordinal - 1)
        search = self._ordinal % _SEARCH_EVERY == 0 or (check and self.config.whole)
        return StepPlan(modules=None if search else self._examiner.callers())

    def microbatch(self, moment: Moment) -> None:
        """The forward of a microbatch begins."""
        self._calls.restart()

    def calls_end(self) -> None:
        """The schedule has returned: later calls, of the optimizer, do not belong to the model."""
        self._calls.remove()
        self._targets.remove()

    def remove(self) -> None:
        """Remove the hooks; gradients that still arrive are ignored."""
        self._calls.remove()
        self._targets.remove()
        if self._backward is not None:
            self._backward.restart()

    def pause(self) -> None:
        """The model runs for something else than the step."""
        self._calls.pause()
        self._targets.pause()

    def resume(self) -> None:
        """The step goes on."""
        self._calls.resume()
        self._targets.resume()

    def finish(self, complete: bool) -> None:
        """The step is over: every few steps the results go to the writer."""
        self.remove()
        plan = self._runner.plan
        if plan.survey is not None:
            self._note_outliers(plan.survey)
            if complete and not plan.examine:
                costs = {**plan.survey.costs, **self._targets.costs(plan.survey.costs)}
                self._schedule = Schedule(costs, self.config.share, plan.survey.microbatches)
        self._ordinal += complete
        self.steps.append(self._job.clock.step)
        self._pending += 1
        late = time.monotonic() - self._submitted > _SECONDS_PER_FILE
        if late or self._pending >= _STEPS_PER_FILE or len(self._runner.found) >= _ROWS_PER_FILE:
            self._submit()

    def _note_outliers(self, survey: Survey) -> None:
        for call in survey.constants.outliers():
            here, there = _numbers(call.constants), _numbers(call.others)
            note = f"uses constant {here} where {call.layers} other layers use {there}"
            self._runner.note_outlier(call.name, call.api, note)

    def _submit(self) -> None:
        self._pending, self._submitted = 0, time.monotonic()
        taken = self._runner.take()
        if taken is None:
            return
        examined, statistics = taken
        self._handed_over += len(examined)
        self._job.submit(PerturbBatch(examined[0].step, len(examined), lambda: self._judged_rows(examined, statistics)))

    def _judged_rows(
        self, examined: Sequence[Examined], statistics: Callable[[], npt.NDArray[np.float64]]
    ) -> Mapping[int, Sequence[Row]]:
        """In the writer thread: the rows of each step, with verdicts; prints a line for each of the first suspects."""
        rows: dict[int, list[Row]] = {}
        for seen, verdict in zip(examined, self._judge.verdicts(examined, statistics()), strict=True):
            rows.setdefault(seen.step, []).append(row_of(seen, verdict))
            if verdict.word != "ok" and seen.name not in self._reported and len(self._reported) < _MOST_LINES:
                self._reported.add(seen.name)
                note = f" ({'expected: ' * (verdict.word == 'wrong')}{seen.note})" if seen.note else ""
                line = f"perturb: step {seen.step}: {seen.name} is {verdict.word}{note}"
                self._job.say(f"{line}; msprobe-megatron diagnose ranks suspects", "perturb")
        return rows

    def close(self) -> None:
        """The run is over."""
        self._submit()

    def not_happened(self, seen: Seen) -> list[str]:
        """Steps that never came, and patterns that matched nothing."""
        found = missing_steps(self._job.config.steps, self.steps, seen, selects_nothing=False)
        unmatched = self._selection.unmatched() if self.steps else []
        found += [f"perturb: {text!r} matches no call or module of this rank" for text in unmatched]
        skipped = self._targets.skipped()
        if self.steps and skipped and not self._examined():
            name, reason = next(iter(skipped.items()))
            more = f"{name} ({reason}) and {len(skipped) - 1} more are never run twice"
            found.append(f"perturb: nothing was examined; {more}")
        return found

    def _examined(self) -> int:
        return self._handed_over + len(self._runner.found)

    def ledger(self) -> dict[str, Any]:
        """What was examined, refused and found."""
        schedule = self._schedule
        plan = {"steps_of_a_round": schedule.round_length, "calls": len(self._survey.costs)} if schedule else {}
        return {
            "examined": self._examined(),
            "verdicts": dict(self._judge.counts),
            **self._examiner.ledger(),
            "left_alone": self._targets.skipped(),
            "plan": plan,
            "steps": self.steps,
        }


def _numbers(constants: tuple[float | str, ...]) -> str:
    texts = (repr(value) if isinstance(value, str) else f"{value:.9g}" for value in constants)
    return ", ".join(texts) or "no number"
