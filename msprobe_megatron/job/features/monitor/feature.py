"""Section `monitor`: a few statistics of every watched step, for as long as the job runs.

Puts the probe of the monitor and the sites that feed it together. Hooks and patches stay installed as long as the next
step is watched too; on a step that is not, nothing of the monitor is there.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from msprobe_megatron.config import ConfigError, MonitorConfig, StepSelection
from msprobe_megatron.config.control_orders import Order
from msprobe_megatron.job import devices
from msprobe_megatron.job.clock import Moment
from msprobe_megatron.job.features.feature import Feature, JobContext, Seen
from msprobe_megatron.job.features.monitor.probe import MonitorProbe
from msprobe_megatron.job.features.size_estimate import SizeEstimate, requested_steps
from msprobe_megatron.job.record.monitor_files import MonitorBatch, MonitorBatches, MonitorEnd
from msprobe_megatron.job.record.slots import SlotTable
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.comm.collectives import CommSite
from msprobe_megatron.job.sites.module.modules import ModuleSite
from msprobe_megatron.job.sites.sink import Reading
from msprobe_megatron.job.sites.training.gradients import GradientSite, WatchedParameters
from msprobe_megatron.job.sites.training.losses import LossSite
from msprobe_megatron.job.sites.training.metrics import Metrics, MetricSite
from msprobe_megatron.job.sites.training.optimizer_states import OptimizerStates
from msprobe_megatron.job.sites.training.progress import Arguments, Scalars, Throughput
from msprobe_megatron.topology import names
from msprobe_megatron.topology.shards_of.dtensors import local_part
from msprobe_megatron.topology.shards_of.grad_buffers import reduced_range

_SLOT_BYTES = 32 << 20
_ROWS_PER_BLOCK = 256
HAND_OVER_SECONDS = 0.1
"""Steps shorter than this are submitted to the writer together."""


class MonitorFeature(Feature):
    """Watches the model on the steps that `start_step`, `every`, `window` and `collect_times` select.

    Probe file::

        monitor:
          every: 10
          activations: true
          format: [parquet, tensorboard]
    """

    name = "monitor"

    def __init__(self, job: JobContext, config: MonitorConfig) -> None:
        self.config = config
        self._job = job
        self._watched_steps = self._collected = 0
        self._on = True
        self._last_step = -1
        self._pending: list[MonitorBatch] = []
        self._handed_over = 0.0
        device = devices.select()
        self._slot_bytes = min(_SLOT_BYTES, job.config.limits.host_memory // 4)
        slots = SlotTable.on(device, self._slot_bytes, _ROWS_PER_BLOCK, digest=config.data)
        self._probe = probe = MonitorProbe(config, job.clock, slots, job.watchers, job.fault)
        self._size_estimate = SizeEstimate(job, "monitor", "watched")
        probe.file.on_first_file = self._estimate_size
        self._modules = ModuleSite(job.chunks, probe, job.clock, job.where, job.fault, stacks=False, biases=False)
        self._watched = WatchedParameters(job.chunks, probe, job.where)
        self._gradients = GradientSite(
            job.chunks, self._watched, probe, job.fault, microbatches=config.microbatch_gradients
        )
        self._optimizer = OptimizerStates(job.optimizer, self._watched, probe, config, job.fault)
        self._scalars = Scalars(job.optimizer, probe)
        self._losses = LossSite(probe)
        self._arguments = Arguments(job.chunks, probe, job.clock, job.fault, digests=config.data)
        self._throughput = Throughput(probe, device.device)
        self._metrics = MetricSite(
            job.chunks,
            self._watched,
            Metrics(probe),
            job.clock,
            job.fault,
            config.metrics,
            probe.targets.inside,
        )
        self._comm = CommSite(probe, job.clock, job.where, job.fault)
        self._parameters = _Parameters(self._watched, probe)
        if job.holds_whole_model:
            self._refuse_unmatched()

    def _refuse_unmatched(self) -> None:
        unmatched = self._probe.targets.unmatched()
        if unmatched:
            some = [entry.name for chunk in self._job.chunks for entry in names.modules(chunk)][:6]
            raise ConfigError(
                f"{self._job.config.source}: monitor.targets: {unmatched[0]!r} is no module or parameter of this"
                f" model; accepted: a name such as {', '.join(some)}"
            )

    def next_from(self, step: int) -> int | None:
        """The first step from `step` on that `start_step`, `every`, `window` and `collect_times` select."""
        config = self.config
        enough = config.collect_times is not None and self._collected >= config.collect_times
        if not self._on or (enough and step != self._last_step):
            return None
        return next_watched(step, config.start_step, config.every, config.window)

    def obey(self, order: Order) -> bool:
        """Stop watching, or continue as the probe file says, with `collect_times` counted from zero."""
        if order.monitor is None:
            return False
        self._on, self._collected = order.monitor, 0
        if not self._on:
            self.remove()
        return True

    def describe(self) -> str:
        """What is watched, and how often."""
        return f"watching {len(self._modules.watched)} modules and {len(self._watched)} parameters" + (
            f" every {self.config.every} steps" if self.config.every > 1 else " at every step"
        )

    def begin(self) -> None:
        """A watched step begins: install the hooks, or resume them."""
        config = self.config
        self._watched_steps += 1
        self._collected += 1
        self._last_step = self._job.clock.step
        if config.activations:
            self._modules.install()
        if config.gradients or config.microbatch_gradients:
            self._gradients.install()
        self._optimizer.install()
        self._arguments.install()
        self._metrics.install()
        if config.comm:
            self._comm.install()
        self._throughput.begin()

    def pause(self) -> None:
        """The model runs for something else than the step."""
        for site in (self._modules, self._gradients, self._arguments, self._metrics):
            site.pause()

    def resume(self) -> None:
        """The step continues."""
        for site in (self._modules, self._gradients, self._arguments, self._metrics):
            site.resume()

    def reported(self, entry: Any, moment: Moment) -> None:
        """The loss function of a microbatch has reported `entry`."""
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
        self._probe.memory_changed()
        self._comm.optimizing = True
        with untraced():
            if self.config.gradients:
                self._gradients.reduced()
            if self.config.parameters:
                self._parameters.read("before")
            self._metrics.weights()
            self._scalars.before_step()

    def after_optimizer(self, result: Any) -> None:
        """The optimizer has stepped: states and parameters are new."""
        self._probe.memory_changed()
        with untraced():
            self._optimizer.after_step()
            if self.config.parameters:
                self._parameters.read("after")
            self._scalars.after_step(result)

    def finish(self, complete: bool) -> None:
        """The step is over: its rows go to the writer."""
        step = self._job.clock.step
        self._throughput.finish(step, self._arguments.samples, self._arguments.tokens)
        self._comm.remove()
        if self.next_from(step + 1) == step + 1:
            self._rest()
        else:
            self.remove()
        self._pending.append(self._probe.finish())
        # Watchers see every step at once; a file can wait.
        if self._job.watchers or time.monotonic() - self._handed_over >= HAND_OVER_SECONDS:
            self._hand_over()

    def _hand_over(self) -> None:
        pending, self._pending = self._pending, []
        self._handed_over = time.monotonic()
        if pending:
            self._job.submit(MonitorBatches(pending))

    def _estimate_size(self, written: int, steps: int, first: int) -> None:
        """The first file is on disk, of so many bytes and steps. Runs in the writer thread."""
        config, every = self.config, self.config.every
        watched = config.window if config.window is not None else StepSelection()
        count = requested_steps(self._job, watched, max(first, config.start_step))
        if config.collect_times is not None or count is not None:
            known = [n for n in (None if count is None else -(-count // every), config.collect_times) if n is not None]
            count = min(known)
        self._size_estimate.report(written // steps, count)

    def _rest(self) -> None:
        for site in (self._modules, self._gradients, self._arguments, self._optimizer, self._metrics):
            site.pause()

    def remove(self) -> None:
        """Remove the hooks."""
        for site in (self._modules, self._gradients, self._arguments, self._optimizer, self._metrics, self._comm):
            site.remove()

    def close(self) -> None:
        """The run is over: write the steps that have no file yet."""
        self._throughput.close()
        self._hand_over()
        self._job.submit(MonitorEnd(self._probe.file))

    def not_happened(self, seen: Seen) -> list[str]:
        """Nothing watched although there were steps, or kinds that this optimizer cannot show."""
        found = [
            f"monitor: gradients at the step of {name} cannot be seen: it has no step hooks"
            for name in sorted(self._optimizer.without_hooks)
        ]
        no_room = self._probe.ledger()["no_room"]
        if no_room:
            found.append(
                f"monitor: {no_room} rows exceeded the {self._slot_bytes} bytes of the slot table; set targets, or"
                " microbatch_gradients: false"
            )
        if not self._watched_steps and seen.last >= 0:
            found.append(f"monitor: no step was watched: the last one was {seen.last}")
        if self._job.where.pp_size == 1:  # another stage may have what this one has not
            found += [
                f"monitor.metrics: {name}: no module of this model provides it"
                for name, n in self._metrics.found.items()
                if not n
            ]
        if self.config.targets and not self._modules.watched and not len(self._watched):
            found.append("monitor.targets: none of them is on this rank")
        return found

    def ledger(self) -> dict[str, Any]:
        """What was bound, matched and observed."""
        bound = {"modules": len(self._modules.watched), "parameters": len(self._watched)}
        return {
            **self._probe.ledger(),
            "bound": bound,
            "steps": self._watched_steps,
            "absent": self._optimizer.absent(),
            "patches": self._gradients.ledger(),
            "announced": self._size_estimate.ledger,
        }


class _Parameters:
    """Weights before and after the step of the optimizer."""

    def __init__(self, watched: WatchedParameters, probe: MonitorProbe) -> None:
        self._probe, self._watched = probe, watched
        self._known: dict[str, tuple[Reading, list[torch.Tensor]]] = {}

    def read(self, when: str) -> None:
        """Read all of them."""
        if when not in self._known:
            found = [self._one(chunk, entry, when) for _, chunk, entry in self._watched.entries]
            here = [one for one in found if one is not None]
            self._known[when] = (Reading([place for place, _ in here], "optimizer"), [x for _, x in here])
        reading, tensors = self._known[when]
        if tensors:
            self._probe.read(reading, tensors)

    def _one(self, chunk: Any, entry: names.NamedParameter, when: str) -> tuple[Any, torch.Tensor] | None:
        tensor, part = local_part(entry.parameter).detach(), None
        overlapped = getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False)
        if when == "after" and overlapped:
            # The shards that other ranks updated arrive with the next forward.
            part = reduced_range(chunk, entry.parameter)
            if part is not None:
                if part[0] == part[1]:
                    return None
                tensor = tensor.reshape(-1)[part[0] : part[1]]
        return self._watched.place(entry.parameter, "parameter", "weight", when, part), tensor


def next_watched(step: int, start: int, every: int, window: StepSelection | None = None) -> int | None:
    """The first step from `step` on that is `start`, `start` + `every`, … and in `window`.

    Example::

        >>> next_watched(11, start=0, every=10)
        20
    """
    step = max(step, start)
    while True:
        step += (start - step) % every
        if window is None:
            return step
        inside = window.next_from(step)
        if inside is None or inside == step:
            return inside
        step = inside
