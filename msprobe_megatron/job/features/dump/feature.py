"""The dump of one session: its probe and the sites that feed it, put together.

The session drives it through a step (begin, microbatches, optimizer, finish) and knows nothing of what it watches;
a new site of the dump is one more line here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from msprobe_megatron import backends
from msprobe_megatron.announcing import Announcement, Announcer, steps_asked
from msprobe_megatron.clock import Moment
from msprobe_megatron.config import ConfigError, DumpConfig, StepSelection
from msprobe_megatron.config.orders import Order
from msprobe_megatron.facts import missing_steps
from msprobe_megatron.functions_asked import declared_functions, missing
from msprobe_megatron.parts import Job, Part
from msprobe_megatron.patching import PatchSet, declared
from msprobe_megatron.probes.dump import DumpProbe
from msprobe_megatron.probes.narrowing import Scoped, Sink, Sliced, open_at_start
from msprobe_megatron.probes.window_names import check_window
from msprobe_megatron.record.slots import SlotTable
from msprobe_megatron.record.tensors import PACK_BYTES, TensorPacks
from msprobe_megatron.sites.api import ApiSite
from msprobe_megatron.sites.arguments import own_work
from msprobe_megatron.sites.comm import CommSite
from msprobe_megatron.sites.frames import ModuleFrames
from msprobe_megatron.sites.losses import LossSite
from msprobe_megatron.sites.modules import ModuleSite
from msprobe_megatron.sites.optimizer import OptimizerSite
from msprobe_megatron.sites.saved import SavedSite
from msprobe_megatron.topology import names
from msprobe_megatron.topology.coordinates import Coordinates


class Dumping(Part):
    """What the `dump` section of the probe file asks, bound to a model.

    Example::

        dump = Dumping(job, config.dump)
        dump.begin()
        ...
        dump.finish(complete=True)
    """

    name = "dump"

    def __init__(self, job: Job, asked: DumpConfig, *, announces: bool = True) -> None:
        config, chunks, clock, where, fault = job.config, job.chunks, job.clock, job.where, job.fault
        self.asked = asked
        self.level: str = asked.level
        self.steps: list[int] = []
        self._selections: list[tuple[StepSelection, str]] = [(config.steps, asked.level)]
        self._job = job
        self._announcer, self._announces = Announcer(job, "dump", "recorded"), announces
        device = backends.select()
        slots = SlotTable(
            device.device,
            float_dtype=device.float_dtype,
            to_host=device.to_host,
            limit_bytes=config.limits.host_memory // 4,
            digest=asked.digest is True,
            sketch=asked.sketch,
        )
        packs = TensorPacks(device.to_host, job.submit, min(PACK_BYTES, config.limits.host_memory // 8))
        self._probe = DumpProbe(asked, clock, slots, where, packs)
        self._scope: Scoped | None = None
        self._calls_seen = False
        sink = self._narrowed(chunks, where, config.source)
        self._modules = ModuleSite(chunks, sink, clock, where, fault, asked.stacks)
        self._parameters = OptimizerSite(chunks, job.optimizer, sink, where)
        self._losses = LossSite(self._probe)
        self._frames = ModuleFrames(chunks, clock, fault)
        self._apis = ApiSite(self._frames, sink, clock, fault, asked.apis, asked.stacks, len(self._modules.watched))
        self._functions = PatchSet([*declared("calls"), *declared_functions(asked.functions)], self._apis)
        self._refuse_unfound(config.source)
        self._comm = CommSite(sink, clock, where, fault, self._frames, self._apis.new_site)
        self._saved = SavedSite(sink, clock, fault)
        self._alone = where.pp_size == 1 and where.ep_size == 1
        # Names of API calls are not known before they are called.
        if self._alone and asked.level == "L0":
            self._refuse_unmatched(config.source, chunks)

    def _narrowed(self, chunks: Sequence[nn.Module], where: Coordinates, source: str) -> Sink:
        """The probe, behind the window and the slices that were asked for."""
        sink: Sink = self._probe
        if self.asked.slice:
            sink = Sliced(sink, self.asked.slice)
        if self.asked.scope:
            first, last = self.asked.scope
            here = [entry.name for chunk in chunks for entry in names.modules(chunk)]
            alone = where.pp_size == 1 and where.ep_size == 1
            check_window(self.asked.level, first, last, here, source, alone=alone)
            opened = open_at_start(first, here, where.pp == 0)
            sink = self._scope = Scoped(sink, first, last, opened=opened, alone=alone)
        return sink

    def _refuse_unfound(self, source: str) -> None:
        """A function that nobody has imported by now is most likely misspelt."""
        for entry in self._functions.entries:
            problem = missing(entry.patch) if entry.patch.phase == "functions_asked" else None
            if problem is not None:
                raise ConfigError(f"{source}: dump.functions: {entry.patch.targets[0]!r}: {problem}")

    def _refuse_unmatched(self, source: str, chunks: Sequence[nn.Module]) -> None:
        """A pattern without a match is an error where it can be known: when no other stage can have the name."""
        unmatched = self._probe.unmatched()
        if unmatched:
            some = [entry.name for chunk in chunks for entry in names.modules(chunk)][:6]
            raise ConfigError(
                f"{source}: dump.list: {unmatched[0]!r} matches no module or parameter;"
                f" accepted: part of a canonical name such as {', '.join(some)}"
            )

    def next_from(self, step: int) -> int | None:
        """The first step from `step` on that `steps` of the probe file or an order selects."""
        return min((n for steps, _ in self._selections if (n := steps.next_from(step)) is not None), default=None)

    def obey(self, order: Order) -> bool:
        """Record other steps, at another level, no more, or as the probe file says."""
        if order.dump is not None:
            self._selections = [(self._job.config.steps, self.asked.level)] if order.dump else []
        if order.steps is not None:
            self._selections.append((order.steps, order.level or self.asked.level))
        elif order.level is not None:
            self._selections = [(steps, order.level) for steps, _ in self._selections]
        # Hooks that rest since the last step were to be used in this one; `begin` sets them again if they are.
        self._modules.remove()
        return order.monitor is None or order != Order(monitor=order.monitor)

    def describe(self) -> str:
        """What is recorded of which steps."""
        return f"recording {self.asked.level} {self.asked.task} of steps {self._job.config.steps.describe()}"

    def begin(self) -> None:
        """A recorded step begins: set the hooks."""
        step = self._job.clock.step
        self.level = next((level for steps, level in reversed(self._selections) if step in steps), self.asked.level)
        self._saved.install()
        if self.level in ("L1", "mix"):
            self._calls_seen = True
            self._frames.install()
            self._apis.install()
            self._functions.apply()
            self._comm.install()
        if self.level in ("L0", "mix"):
            self._modules.install()

    def calls_end(self) -> None:
        """The schedule has returned: what the optimizer calls is not of the model."""
        self._comm.optimizing = True
        if self._calls_seen:
            self._frames.remove()
            self._functions.revert()
            self._apis.remove()

    def remove(self) -> None:
        """Take the hooks away."""
        self._remove_all_but_modules()
        self._modules.remove()

    def _remove_all_but_modules(self) -> None:
        self.calls_end()
        self._saved.remove()
        self._comm.remove()

    def pause(self) -> None:
        """The model runs for something else than the step; gradients that are awaited stay awaited."""
        self._apis.remove()
        self._frames.pause()
        self._modules.pause()

    def resume(self) -> None:
        """The step goes on."""
        if self.level in ("L1", "mix"):
            self._frames.resume()
            self._apis.resume()
        if self.level in ("L0", "mix"):
            self._modules.resume()

    def reported(self, entry: Any, moment: Moment) -> None:
        """The loss function of a microbatch has reported `entry`."""
        if self.level == "debug":
            return
        with own_work():
            self._losses.report(entry, moment.microbatch, moment.chunk)

    def saved(self, variable: Any, name: str, gradient: bool) -> None:
        """The training code hands over a variable."""
        self._saved.save(variable, name, gradient)

    def microbatch(self, moment: Moment) -> None:
        """The input of a microbatch may have come into the memory of the last one."""
        self._probe.memory_changed()

    def memory_changed(self) -> None:
        """Tensors may have changed without their version counters telling."""
        self._probe.memory_changed()

    def before_optimizer(self) -> None:
        """The optimizer is about to step: parameters and gradients are final."""
        # A plain loop has no schedule that ends; what the optimizer calls is not of the model there either.
        self.calls_end()
        # Gradient buffers are written by collectives and fused kernels, which no version counter tells of.
        self._probe.memory_changed()
        if self.level != "debug":
            with own_work():
                self._parameters.collect()

    def finish(self, complete: bool) -> None:
        """The step is over: its rows go to the writer."""
        step = self._job.clock.step
        self._remove_all_but_modules()
        if self.next_from(step + 1) == step + 1:
            self._modules.pause()
        else:
            self._modules.remove()
        sites = {"modules": self._modules.structure(), "apis": self._apis.structure}
        self._job.submit(self._probe.finish(complete, sites))
        if self._announces and not self.steps and complete:
            self._job.submit(Announcement(self._announcer, step, steps_asked(self._job, self._job.config.steps, step)))
        self.steps.append(step)

    def not_happened(self, last_step: int) -> list[str]:
        """Steps that never came, or a selection that matched nothing here."""
        nothing = self.asked.level in ("L0", "mix") and not self._modules.watched and not len(self._parameters)
        if self.asked.level == "debug" and not self._saved.fired and self.steps:
            return ["level is debug and nothing was saved; call msprobe_megatron.save(variable, name)"]
        if not self._job.config.steps.spans and not self.steps:
            return []  # steps: none, and nobody asked for any while the job ran
        missed = self._scope.missed() if self._scope is not None and self.steps else []
        if self._alone and self.steps:
            missed += [f"dump.list: {text!r} matched nothing on this rank" for text in self._probe.unmatched()]
        return missed + missing_steps(self._job.config.steps, self.steps, last_step, selects_nothing=nothing)

    def ledger(self) -> dict[str, Any]:
        """What was bound, matched and fired."""
        bound = {
            "modules": len(self._modules.watched),
            "parameters": len(self._parameters),
            "api_calls": len(self._apis.structure),
        }
        found = {"bound": bound, "steps": self.steps, "never_waited": self._comm.never_waited}
        return {**self._probe.ledger(), **found, "announced": self._announcer.ledger}
