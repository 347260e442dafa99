"""The dump of one session: its probe and the sites that feed it, put together.

The session drives it through a step (begin, microbatches, optimizer, finish) and knows nothing of what it watches;
a new site of the dump is one more line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from msprobe_megatron import backends
from msprobe_megatron.clock import Clock, Moment
from msprobe_megatron.config import ConfigError, DumpConfig, ProbeConfig
from msprobe_megatron.probes.dump import DumpProbe
from msprobe_megatron.record.slots import SlotTable
from msprobe_megatron.record.writer import StepBatch
from msprobe_megatron.sites.losses import LossSite
from msprobe_megatron.sites.modules import ModuleSite
from msprobe_megatron.sites.optimizer import OptimizerSite
from msprobe_megatron.topology import names
from msprobe_megatron.topology.coordinates import Coordinates


class Dumping:
    """What the `dump` section of the probe file asks, bound to a model.

    Example::

        dump = Dumping(config, chunks, optimizer, clock, coordinates, fault)
        dump.begin()
        ...
        writer.submit(dump.finish(complete=True))
    """

    def __init__(
        self,
        config: ProbeConfig,
        chunks: Sequence[nn.Module],
        optimizer: Any,
        clock: Clock,
        where: Coordinates,
        fault: Callable[[BaseException, str], None],
    ) -> None:
        asked = config.dump
        if asked is None:
            raise ConfigError(f"{config.source}: dump: missing; accepted: a section that says what to record")
        self.asked: DumpConfig = asked
        self._clock = clock
        device = backends.select()
        slots = SlotTable(
            device.device,
            float_dtype=device.float_dtype,
            to_host=device.to_host,
            limit_bytes=config.limits.host_memory // 4,
            digest=asked.digest is True,
            sketch=asked.sketch,
        )
        self._probe = DumpProbe(asked, clock, slots, where)
        self._modules = ModuleSite(chunks, self._probe, clock, where, fault, asked.stacks)
        self._parameters = OptimizerSite(chunks, optimizer, self._probe, where)
        self._losses = LossSite(self._probe)
        if where.pp_size == 1 and where.ep_size == 1:
            self._refuse_unmatched(config.source, chunks)

    def _refuse_unmatched(self, source: str, chunks: Sequence[nn.Module]) -> None:
        """A pattern without a match is an error where it can be known: when no other stage can have the name."""
        unmatched = self._probe.unmatched()
        if unmatched:
            some = [entry.name for chunk in chunks for entry in names.modules(chunk)][:6]
            raise ConfigError(
                f"{source}: dump.list: {unmatched[0]!r} matches no module or parameter;"
                f" accepted: part of a canonical name such as {', '.join(some)}"
            )

    @property
    def selects_nothing(self) -> bool:
        """Whether no module and no parameter of this rank is watched."""
        return not self._modules.watched and not len(self._parameters)

    def begin(self) -> None:
        """A recorded step begins: set the hooks."""
        self._modules.install()

    def remove(self) -> None:
        """Take the hooks away."""
        self._modules.remove()

    def reported(self, entry: Any, moment: Moment) -> None:
        """The loss function of a microbatch has reported `entry`."""
        self._losses.report(entry, moment.microbatch, moment.chunk)

    def memory_changed(self) -> None:
        """Tensors may have changed without their version counters telling."""
        self._probe.memory_changed()

    def before_optimizer(self) -> None:
        """The optimizer is about to step: parameters and gradients are final."""
        # Gradient buffers are written by collectives and fused kernels, which no version counter tells of.
        self._probe.memory_changed()
        self._parameters.collect()

    def finish(self, complete: bool) -> StepBatch:
        """The step is over: its rows, ready for the writer."""
        self._modules.remove()
        return self._probe.finish(complete, {"step": self._clock.step, "modules": self._modules.structure()})

    def ledger(self) -> dict[str, Any]:
        """What was bound, matched and fired."""
        bound = {"modules": len(self._modules.watched), "parameters": len(self._parameters)}
        return {**self._probe.ledger(), "bound": bound}
