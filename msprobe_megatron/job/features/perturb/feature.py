"""The perturb part of a session: its probe and the sites that feed it, put together.

The session drives it through a step. With a budget the first step is only watched, to learn what is called and what
that costs; each step after it examines a few calls, in the modules that make them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from typing import Any

from msprobe_megatron import backends
from msprobe_megatron.clock import Moment
from msprobe_megatron.config import PerturbConfig
from msprobe_megatron.facts import missing_steps
from msprobe_megatron.parts import Job, Part
from msprobe_megatron.perturb_targets import ModuleTargets
from msprobe_megatron.probes.perturb.backward import BackwardExaminer
from msprobe_megatron.probes.perturb.batch import PerturbBatch
from msprobe_megatron.probes.perturb.budget import Cost, Plan, cost_of
from msprobe_megatron.probes.perturb.classes import class_of
from msprobe_megatron.probes.perturb.examiner import Examiner
from msprobe_megatron.probes.perturb.figures import Figures
from msprobe_megatron.probes.perturb.preheat import Preheat
from msprobe_megatron.probes.perturb.structure import Structure
from msprobe_megatron.probes.perturb.verdict import Examined, Verdict
from msprobe_megatron.sites.calls import CallSite

_STEPS_A_FILE = 100
_SECONDS_A_FILE = 30.0
_ROWS_A_FILE = 2000
# Calls that are named are looked for everywhere in the first step, and again now and then; else where they were found.
_LOOK_EVERYWHERE = 50
_TOLD = 10


class Perturbing(Part):
    """What the `perturb` section of the probe file asks, bound to a model.

    Example::

        part = Perturbing(job, config.perturb)
        part.begin(); ...; part.finish(complete=True)
    """

    name = "perturb"

    def __init__(self, job: Job, asked: PerturbConfig) -> None:
        self.asked, self._job = asked, job
        self.steps: list[int] = []
        device = backends.select()
        self._device = device.name
        self._figures = Figures(device.device, device.float_dtype, device.to_host)
        self._examiner = Examiner(asked, job.clock, self._figures, job.fault)
        self._examiner.most = max(_ROWS_A_FILE, job.config.limits.host_memory // 8192)
        in_backward = asked.stage == "backward" and asked.handler == "check"
        self._calls = CallSite(job.chunks, job.clock, job.fault, self._examiner, in_backward=in_backward)
        self._backward = BackwardExaminer(self._examiner)
        if in_backward:
            self._examiner.watch_gradients = self._backward.watch
        self._targets = ModuleTargets(job, self._examiner)
        self._preheat = Preheat() if asked.preheat else None
        self._structure = Structure()
        self._costs: dict[str, Cost] = {}
        self._microbatches = 1
        self.plan: Plan | None = None
        self._ordinal = 0
        self._verdicts: Counter[str] = Counter()
        self._told: set[str] = set()
        self._pending, self._submitted = 0, time.monotonic()
        self.examined = 0

    def next_from(self, step: int) -> int | None:
        """The first step from `step` on that `steps` of the probe file selects."""
        return self._job.config.steps.next_from(step)

    def describe(self) -> str:
        """What is examined in which steps."""
        asked = self.asked
        what = ", ".join((*asked.list, *asked.scope, *asked.modules)) or "the whole network"
        return f"perturb: {asked.handler} {asked.stage} of {what} at steps {self._job.config.steps.describe()}"

    def begin(self) -> None:
        """A step begins: choose, and set the hooks."""
        examiner = self._examiner
        examiner.begin()
        self._backward.round += 1
        chosen: Collection[str] | None = None
        names = None
        if self.asked.handler == "fix":
            chosen = examiner.makers.copy() if self._ordinal % _LOOK_EVERYWHERE else None
        else:
            first = self._ordinal == 0
            examiner.constants = self._structure.saw if first else None
            examiner.observe = self._observe if first and self.asked.share < 1 else None
            if self.plan is not None:
                names = self.plan.chosen(self._ordinal - 1)
                examiner.chosen = names
                examiner.microbatch = self.plan.microbatch(self._ordinal - 1)
                chosen = {name.partition("/")[0] for name in names}
            elif not self.asked.whole and self._ordinal % _LOOK_EVERYWHERE:
                chosen = examiner.makers.copy()  # threads of the host may add to it
        if self.asked.list or self.asked.scope or self.asked.whole:
            self._calls.install(chosen)
        if examiner.observe is None:
            self._targets.install(names)

    def _observe(self, name: str, where: Any, api: str, args: Any, kwargs: Any, result: Any) -> None:
        self._microbatches = max(self._microbatches, where.moment.microbatch + 1)
        if name not in self._costs:
            stage = self.asked.stage
            self._costs[name] = cost_of(class_of(api), args, kwargs, result, self._device, stage, api)

    def microbatch(self, moment: Moment) -> None:
        """The forward of a microbatch begins."""
        self._calls.restart()

    def calls_end(self) -> None:
        """The schedule has returned: what the optimizer calls is not of the model."""
        self._calls.remove()
        self._targets.remove()

    def remove(self) -> None:
        """Take the hooks away; gradients that still arrive are ignored."""
        self._calls.remove()
        self._targets.remove()
        self._backward.round += 1

    def pause(self) -> None:
        """The model runs for something else than the step."""
        self._calls.active = self._targets.active = False

    def resume(self) -> None:
        """The step goes on."""
        self._calls.active = self._targets.active = True

    def finish(self, complete: bool) -> None:
        """The step is over: what a few of them found goes to the writer."""
        self.remove()
        step = self._job.clock.step
        if self._examiner.constants is not None:
            self._note_odd()
        if self._examiner.observe is not None and complete:
            self._plan()
        self._ordinal += complete
        self.steps.append(step)
        self._pending += 1
        late = time.monotonic() - self._submitted > _SECONDS_A_FILE
        if late or self._pending >= _STEPS_A_FILE or len(self._examiner.found) >= _ROWS_A_FILE:
            self._submit()

    def _plan(self) -> None:
        examiner = self._examiner
        examiner.observe = None
        self.plan = Plan({**self._costs, **self._targets.costs(self._costs)}, self.asked.share, self._microbatches)
        examiner.whole_again = self.plan.whole

    def _note_odd(self) -> None:
        examiner = self._examiner
        for odd in self._structure.odd():
            note = f"is given {_listed(odd.constants)} where {odd.layers} other layers give {_listed(odd.others)}"
            examiner.found.append(
                Examined(
                    -1,
                    self._job.clock.step,
                    self._job.clock.tick(),
                    odd.name,
                    odd.api,
                    0,
                    0,
                    "forward",
                    0,
                    "",
                    class_of(odd.api),
                    1,
                    "",
                    (),
                    self.asked.mode,
                    self.asked.stage,
                    examiner.profile,
                    "odd",
                    note,
                )  # fmt: skip
            )

    def _submit(self) -> None:
        self._pending, self._submitted = 0, time.monotonic()
        with self._figures.changing:
            found, self._examiner.found = self._examiner.found, []
            figures = self._figures.seal() if found else None
        if figures is not None:
            self.examined += len(found)
            self._job.submit(PerturbBatch(found, figures, self._tell, self._verdicts, self._preheat))

    def _tell(self, seen: Examined, verdict: Verdict) -> None:
        """In the writer thread: one line for each operator that was found, the first few of them."""
        if seen.name in self._told or len(self._told) >= _TOLD:
            return
        self._told.add(seen.name)
        note = f" ({seen.note})" if seen.note else ""
        self._job.say(
            f"perturb: step {seen.step}: {seen.name} is {verdict.word}{note}; msprobe-megatron diagnose ranks suspects",
            "perturb",
        )

    def close(self) -> None:
        """The run is over."""
        self._submit()

    def not_happened(self, last_step: int) -> list[str]:
        """Steps that never came, and patterns that nothing had."""
        found = missing_steps(self._job.config.steps, self.steps, last_step, selects_nothing=False)
        unmatched = self._examiner.selection.unmatched() if self.steps else []
        found += [f"perturb: {text!r} matches no call or module of this rank" for text in unmatched]
        alone = self._targets.left_alone()
        if self.steps and alone and not self.examined + len(self._examiner.found):
            name, why = next(iter(alone.items()))
            found.append(f"perturb: nothing was examined; {name} ({why}) and {len(alone) - 1} more are never run twice")
        return found

    def ledger(self) -> dict[str, Any]:
        """What was examined, refused and found."""
        plan = {"steps_of_a_round": self.plan.rounds, "calls": len(self._costs)} if self.plan is not None else {}
        return {
            "examined": self.examined + len(self._examiner.found),
            "verdicts": dict(self._verdicts),
            **self._examiner.ledger(),
            "left_alone": self._targets.left_alone(),
            "plan": plan,
            "steps": self.steps,
        }


def _listed(constants: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.9g}" for value in constants) or "no number"
