"""Section `dump`: every tensor of the requested steps as a row.

`StepRecording` puts the dump's probe and the sites that feed it together and records one step at a time; a new site of
the dump is one more line in it. `DumpFeature` selects the steps and submits them to the writer; the flight recorder
(`recorder/feature.py`) keeps them in memory instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from msprobe_megatron.config import ConfigError, DumpConfig, StepSelection
from msprobe_megatron.config.control_orders import Order
from msprobe_megatron.job import devices
from msprobe_megatron.job.clock import Moment
from msprobe_megatron.job.features.dump.narrowing import Scoped, Sliced, check_window, open_at_start
from msprobe_megatron.job.features.dump.probe import DumpProbe
from msprobe_megatron.job.features.feature import Feature, JobContext, Seen, missing_steps
from msprobe_megatron.job.features.size_estimate import FirstStepBatch, SizeEstimate, requested_steps
from msprobe_megatron.job.measure.hashes import HASHES
from msprobe_megatron.job.patching.patch_set import Patch, PatchSet, Wrap, declared
from msprobe_megatron.job.record.hash_packs import HashPacks
from msprobe_megatron.job.record.slots import SlotTable
from msprobe_megatron.job.record.step_files import StepBatch
from msprobe_megatron.job.record.tensors import PACK_BYTES, TensorPacks
from msprobe_megatron.job.sites.calls.api import ApiSite
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.calls.naming import ModuleFrames
from msprobe_megatron.job.sites.comm.collectives import CommSite
from msprobe_megatron.job.sites.module.buffers import BufferSite
from msprobe_megatron.job.sites.module.modules import ModuleSite
from msprobe_megatron.job.sites.module.routing import RoutingSite
from msprobe_megatron.job.sites.module.tokens import TokenSite
from msprobe_megatron.job.sites.sink import Sink
from msprobe_megatron.job.sites.training.losses import LossSite
from msprobe_megatron.job.sites.training.optimizer import OptimizerSite
from msprobe_megatron.job.sites.training.saved import SavedSite
from msprobe_megatron.topology import names

_USER_FUNCTIONS = "functions_asked"
"""Phase of the patches for `dump.functions`."""


class StepRecording(Feature):
    """Observes every tensor that a `dump` section selects, for as long as a step runs."""

    def __init__(self, job: JobContext, config: DumpConfig) -> None:
        chunks, clock, where, fault = job.chunks, job.clock, job.where, job.fault
        self._job, self.config = job, config
        self.level: str = config.level
        """What the running step records: L0, L1, mix or debug."""
        device, memory = devices.select(), job.config.limits.host_memory
        # A word for the digest in every slot: integers always have theirs.
        slots = SlotTable.on(device, memory // 4, digest=True, sketch=config.sketch)
        pack_bytes, hashes = min(PACK_BYTES, memory // 8), None
        packs = TensorPacks(device.to_host, job.submit, pack_bytes)
        if isinstance(config.digest, str):
            hashes = HashPacks(config.digest, HASHES[config.digest], device.to_host, job.submit, pack_bytes)
        trains = job.config.forward_passes == "off"
        self._probe = DumpProbe(config, clock, slots, where, packs, hashes, once=trains)
        self._scope: Scoped | None = None
        self._calls_seen = False
        sink = self._narrowed()
        self._modules = ModuleSite(chunks, sink, clock, where, fault, config.stacks)
        self._parameters = OptimizerSite(chunks, job.optimizer, sink, where)
        self._buffers = None if trains else BufferSite(chunks, sink, where)
        self._losses = LossSite(self._probe)
        self._frames = ModuleFrames(chunks, clock, fault)
        self._apis = ApiSite(self._frames, sink, clock, fault, config.apis, config.stacks, len(self._modules.watched))
        self._functions = PatchSet([*declared("calls"), *user_functions(config.functions)], self._apis)
        self._comm = CommSite(sink, clock, where, fault, self._frames, self._apis.new_site)
        self._saved = SavedSite(sink, clock, fault)

    def _narrowed(self) -> Sink:
        """The probe, behind the requested window and slices."""
        sink: Sink = self._probe
        if self.config.slice:
            sink = Sliced(sink, self.config.slice)
        if self.config.scope:
            first, last = self.config.scope
            here, alone = self._module_names(), self._job.holds_whole_model
            check_window(self.config.level, first, last, here, self._job.config.source, alone=alone)
            opened = open_at_start(first, here, self._job.where.pp == 0)
            sink = self._scope = Scoped(sink, first, last, opened=opened, alone=alone)
        return sink

    def _module_names(self) -> list[str]:
        return [entry.name for chunk in self._job.chunks for entry in names.modules(chunk)]

    @property
    def records_modules(self) -> bool:
        """True if the level includes modules."""
        return self.level in ("L0", "mix")

    @property
    def records_calls(self) -> bool:
        """True if the level includes API calls and communication."""
        return self.level in ("L1", "mix")

    @property
    def records_training(self) -> bool:
        """True if the level includes losses, parameters and their gradients: all but debug."""
        return self.level != "debug"

    def begin(self) -> None:
        """A recorded step begins: install the hooks."""
        self._saved.install()
        if self.records_calls:
            self._calls_seen = True
            self._frames.install()
            self._apis.install()
            self._functions.apply()
            self._comm.install()
        if self.records_modules:
            self._modules.install()

    def calls_end(self) -> None:
        """The schedule has returned: what the optimizer calls is not part of the model."""
        self._comm.optimizing = True
        if self._calls_seen:
            self._frames.remove()
            self._functions.revert()
            self._apis.remove()

    def remove(self) -> None:
        """Remove the hooks."""
        self._remove_all_but_modules()
        self._modules.remove()

    def _remove_all_but_modules(self) -> None:
        self.calls_end()
        self._saved.remove()
        self._comm.remove()

    def pause(self) -> None:
        """The model runs for something else than the step; pending gradients stay pending."""
        self._apis.remove()
        self._frames.pause()
        self._modules.pause()

    def resume(self) -> None:
        """The step continues."""
        if self.records_calls:
            self._frames.resume()
            self._apis.resume()
        if self.records_modules:
            self._modules.resume()

    def reported(self, entry: Any, moment: Moment) -> None:
        """The loss function of a microbatch has reported `entry`."""
        if self.records_training:
            with untraced():
                self._losses.report(entry, moment.microbatch, moment.chunk)

    def microbatch(self, moment: Moment) -> None:
        """The input of a microbatch may reuse the memory of the last one."""
        self._probe.memory_changed()

    def memory_changed(self) -> None:
        """Tensors may have changed without a change of their version counters."""
        self._probe.memory_changed()

    def before_optimizer(self) -> None:
        """The optimizer is about to step: parameters and gradients are final."""
        # A plain loop has no schedule that ends; what the optimizer calls is not part of the model there either.
        self.calls_end()
        # Collectives and fused kernels write gradient buffers without touching version counters.
        self._probe.memory_changed()
        if self.records_training:
            with untraced():
                self._parameters.collect()
                if self._buffers is not None:
                    self._buffers.collect()

    def after_optimizer(self, result: Any) -> None:
        """The optimizer has stepped and returned `result`."""
        if self.records_training:
            with untraced():
                self._parameters.collect_norm(result)

    def _end_step(self, complete: bool) -> StepBatch:
        """Remove the hooks, or let them rest if the next step is recorded too; return what the step recorded."""
        following = self._job.clock.step + 1
        self._remove_all_but_modules()
        if self.next_from(following) == following:
            self._modules.pause()
        else:
            self._modules.remove()
        sites: dict[str, Any] = {"modules": self._modules.structure(), "apis": self._apis.structure}
        if self._job.clock.passes:
            sites["passes"] = self._job.clock.passes
        return self._probe.finish(complete, sites)

    def _bound(self) -> dict[str, int]:
        return {
            "modules": len(self._modules.watched),
            "parameters": len(self._parameters),
            "api_calls": len(self._apis.structure),
        }


class DumpFeature(StepRecording):
    """Records the steps that the probe file and orders of the running job select.

    Probe file::

        steps: 10-12,100
        dump:
          level: mix              # L0: modules, L1: API calls, mix: both, debug: msprobe_megatron.save() only
          task: statistics        # tensor: the tensors too; structure: names and shapes; nonfinite: the first NaN
          list: [decoder.layers.3, /mlp.*weight/]
    """

    name = "dump"

    def __init__(self, job: JobContext, config: DumpConfig) -> None:
        super().__init__(job, config)
        self.steps: list[int] = []
        self._routing = self._routing_site()
        self._tokens = self._token_site()
        self._selections: list[tuple[StepSelection, str]] = [(job.config.steps, config.level)]
        self._size_estimate = SizeEstimate(job, "dump", "recorded")
        self._refuse_missing_functions()
        # Names of API calls are not known before they are called.
        if job.holds_whole_model and config.level == "L0":
            self._refuse_unmatched()

    def _routing_site(self) -> RoutingSite | None:
        """Choices of routers belong to statistics and tensors of whole steps."""
        job, config = self._job, self.config
        if config.task not in ("statistics", "tensor") or config.scope:
            return None
        site = RoutingSite(job.chunks, self._probe, job.clock, job.where, job.fault)
        return site if len(site) and self._probe.wants_io("forward", "output") else None

    def _token_site(self) -> TokenSite | None:
        """Token ids, positions and log-probs of forward-only passes."""
        job = self._job
        if job.config.forward_passes == "off" or self.config.task not in ("statistics", "tensor") or self.config.scope:
            return None
        return TokenSite(job.chunks, self._probe, job.clock, job.where, job.fault)

    def _refuse_missing_functions(self) -> None:
        """A function that cannot be found by now is most likely misspelt."""
        for entry in self._functions.entries:
            problem = missing(entry.patch) if entry.patch.phase == _USER_FUNCTIONS else None
            if problem is not None:
                raise ConfigError(f"{self._job.config.source}: dump.functions: {entry.patch.targets[0]!r}: {problem}")

    def _refuse_unmatched(self) -> None:
        """A pattern without a match is an error where that can be known: when no other stage can have the name."""
        unmatched = self._probe.unmatched()
        if unmatched:
            raise ConfigError(
                f"{self._job.config.source}: dump.list: {unmatched[0]!r} matches no module or parameter;"
                f" accepted: part of a canonical name such as {', '.join(self._module_names()[:6])}"
            )

    def next_from(self, step: int) -> int | None:
        """The first step from `step` on that `steps` of the probe file or an order selects."""
        return min((n for steps, _ in self._selections if (n := steps.next_from(step)) is not None), default=None)

    def obey(self, order: Order) -> bool:
        """Record other steps, at another level, none at all, or as the probe file says."""
        if order.dump is not None:
            self._selections = [(self._job.config.steps, self.config.level)] if order.dump else []
        if order.steps is not None:
            self._selections.append((order.steps, order.level or self.config.level))
        elif order.level is not None:
            self._selections = [(steps, order.level) for steps, _ in self._selections]
        # Hooks that rest since the last step expect this one to be recorded; `begin` installs them again if it is.
        self._modules.remove()
        return order.monitor is None or order != Order(monitor=order.monitor)

    def describe(self) -> str:
        """What is recorded of which steps."""
        return f"recording {self.config.level} {self.config.task} of steps {self._job.config.steps.describe()}"

    def begin(self) -> None:
        """A recorded step begins: install the hooks of its level."""
        step = self._job.clock.step
        self.level = next((level for steps, level in reversed(self._selections) if step in steps), self.config.level)
        super().begin()
        for site in self._small_sites():
            # Choices of routers are needed at every level: tensors behind them are judged by them.
            if self.records_modules or (site is self._routing and self.level != "debug"):
                site.install()

    def calls_end(self) -> None:
        """The schedule has returned: no router of this step runs any more."""
        super().calls_end()
        for site in self._small_sites():
            site.remove()

    def pause(self) -> None:
        """The model runs for something else than the step."""
        super().pause()
        for site in self._small_sites():
            site.pause()

    def resume(self) -> None:
        """The step continues."""
        super().resume()
        for site in self._small_sites():
            site.resume()

    def _small_sites(self) -> list[RoutingSite | TokenSite]:
        """Sites whose tensors are small and saved whole."""
        return [site for site in (self._routing, self._tokens) if site is not None]

    def saved(self, variable: Any, name: str, gradient: bool) -> None:
        """The training code passes a variable under a name."""
        self._saved.save(variable, name, gradient)

    def finish(self, complete: bool) -> None:
        """The step is over: its rows go to the writer."""
        step = self._job.clock.step
        batch = self._end_step(complete)
        if not complete and not batch.row_count:
            return  # the job ended between two steps: there is no file for a step that never began
        self._job.submit(batch)
        if not self.steps and complete:
            count = requested_steps(self._job, self._job.config.steps, step)
            self._job.submit(FirstStepBatch(self._size_estimate, step, count))
        self.steps.append(step)

    def not_happened(self, seen: Seen) -> list[str]:
        """Steps that never came, or a selection that matched nothing here."""
        level = self.config.level
        nothing = level in ("L0", "mix") and not self._modules.watched and not len(self._parameters)
        if level == "debug" and not self._saved.fired and self.steps:
            return ["level is debug and nothing was saved; call msprobe_megatron.save(variable, name)"]
        if not self._job.config.steps.spans and not self.steps:
            return []  # steps: none, and no order of the running job selected any
        missed = self._scope.missed() if self._scope is not None and self.steps else []
        if self._job.holds_whole_model and self.steps:
            missed += [f"dump.list: {text!r} matched nothing on this rank" for text in self._probe.unmatched()]
        return missed + missing_steps(self._job.config.steps, self.steps, seen, selects_nothing=nothing)

    def ledger(self) -> dict[str, Any]:
        """What was bound, matched and observed."""
        return {
            **self._probe.ledger(),
            "bound": self._bound(),
            "steps": self.steps,
            "never_waited": self._comm.never_waited,
            "announced": self._size_estimate.ledger,
        }


# Functions of `dump.functions` are recorded as API calls under their own names. They are patches like any other: bound
# when a recorded step begins, in every module that imported them by name, and reverted when it is over.


def user_functions(targets: Iterable[str]) -> list[Patch]:
    """The patches for functions named ``module:function`` or ``module:Class.method``."""
    why = "named in dump.functions"
    return [Patch(f"functions.{t}", (t,), _as_api_call(t), phase=_USER_FUNCTIONS, why=why, sweep=True) for t in targets]


def missing(patch: Patch) -> str | None:
    """Why the target of a patch cannot be found; None if it can. Imports its module if necessary."""
    module_name, _, path = patch.targets[0].partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        return f"cannot be imported: {error}; accepted: module:function"
    for name in path.split("."):
        if not hasattr(owner, name):
            return f"{getattr(owner, '__name__', module_name)} has no {name}; accepted: module:function"
        owner = getattr(owner, name)
    return None if callable(owner) else f"is a {type(owner).__name__}, not a function; accepted: module:function"


def _as_api_call(target: str) -> Wrap:
    name = target.replace(":", ".")

    def wrap(original: Callable[..., Any], site: Any) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return site.called(name, original, args, kwargs)

        return function

    return wrap
