"""Site: progress of the job: learning rate, gradient norm, skipped steps, data, time and memory.

Numbers that the host has without synchronizing with a device, and the arguments of the model. Nothing here blocks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.sites.calls.arguments import Found, named_arguments, untraced
from msprobe_megatron.job.sites.module.hooks import HookedSite
from msprobe_megatron.job.sites.module.modules import parameter_names
from msprobe_megatron.job.sites.sink import SeriesSink
from msprobe_megatron.topology import names
from msprobe_megatron.topology.shards import Place, ShardSpec
from msprobe_megatron.topology.shards_of.optimizers import leaves

_MOST_SAMPLES = 64
"""Samples per microbatch that get a digest of their own."""
_TOKENS = 2  # dimensions of token ids: samples, positions
_STATM = "/proc/self/statm"
Fault = Callable[[BaseException, str], None]


def scalar_place(kind: str, name: str, io: str = "value", path: str = "", op: str = "", vpp: int = 0) -> Place:
    """The place of a number that belongs to the whole rank."""
    spec = ShardSpec.unmergeable("a number of this rank")
    return Place(kind, name, io, path, op, vpp, -1, lambda shape: spec, lambda axis: 1)


class Scalars:
    """Learning rate, loss scale, gradient norm, skipped steps."""

    def __init__(self, optimizer: Any, sink: SeriesSink) -> None:
        self._optimizer, self._sink = optimizer, sink
        self._rates: dict[str, Place] = {}
        self._scale, self._skipped = scalar_place("scalar", "loss_scale"), scalar_place("scalar", "skipped")
        # The norm over all ranks: each of them has the same.
        self._norm = Place("loss", "grad_norm", "value", "", "", 0, -1, lambda shape: ShardSpec(), lambda axis: 1)

    def before_step(self) -> None:
        """The optimizer is about to step with these settings."""
        rates = [group.get("lr") for leaf in leaves(self._optimizer) for group in _groups(leaf)]
        # Usually all groups have the same rate: one row per group only where they differ.
        some = rates[:1] if all(rate is rates[0] or _same(rate, rates[0]) for rate in rates) else rates
        for index, rate in enumerate(some):
            path = str(index) if len(some) > 1 else ""
            place = self._rates.get(path)
            if place is None:
                place = self._rates[path] = scalar_place("scalar", "learning_rate", path=path)
            self._report(place, rate)
        getter = getattr(self._optimizer, "get_loss_scale", None)
        if getter is not None:
            self._report(self._scale, getter())

    def after_step(self, result: Any) -> None:
        """The optimizer returned `result`; Megatron's: whether the step was taken, and the gradient norm."""
        if isinstance(result, tuple) and result:
            success = result[0]
            if isinstance(success, bool):
                self._sink.value(self._skipped, not success)
            if len(result) > 1:
                self._report(self._norm, result[1])

    def _report(self, place: Place, number: Any) -> None:
        if isinstance(number, torch.Tensor):
            self._sink.see(place, number.detach().reshape(()) if number.numel() == 1 else number, None, "optimizer")
        elif isinstance(number, int | float):
            self._sink.value(place, number)


def _groups(leaf: Any) -> Sequence[dict[str, Any]]:
    try:
        found = getattr(leaf, "param_groups", ())
    except (AttributeError, TypeError):  # an optimizer without parameters on this rank
        return ()
    return list(found)


def _same(left: Any, right: Any) -> bool:
    return isinstance(left, int | float) and isinstance(right, int | float) and left == right


class Arguments(HookedSite):
    """Arguments of the model: amount of data, and on request a digest of every sample's token ids."""

    def __init__(
        self, chunks: Sequence[nn.Module], sink: SeriesSink, clock: Clock, fault: Fault, *, digests: bool = False
    ) -> None:
        super().__init__()
        # The first chunk runs every microbatch exactly once.
        self._model = names.unwrap(chunks[0])
        self._names = parameter_names(self._model)
        self._sink, self._clock, self._fault, self._digests = sink, clock, fault, digests
        self._places: dict[tuple[str, int], Place] = {}
        self.samples = self.tokens = 0

    def install(self) -> None:
        """Start to report; a hook that is still set is reused."""
        self._active, self.samples, self.tokens = True, 0, 0
        if not self._handles:
            self._handles = [self._model.register_forward_pre_hook(self._called, with_kwargs=True)]

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if not self._active or kwargs is None or (self._clock.away and self._clock.apart()):
            return
        try:
            phase, moment = self._clock.calling()
            if phase == "forward":
                with untraced():
                    self._look(named_arguments(self._names, args, kwargs), moment.microbatch)
        except Exception as error:
            self._fault(error, "arguments of the model")

    def _look(self, found: Found, microbatch: int) -> None:
        ids = [(path, x) for path, x in found if not x.is_floating_point() and x.dim() == _TOKENS]
        if ids:
            self.samples += ids[0][1].shape[0]
            self.tokens += ids[0][1].numel()
        elif found and found[0][1].dim():
            self.samples += found[0][1].shape[0]
        if self._digests:
            for path, x in ids:
                for index, sample in enumerate(x.unbind(0)[:_MOST_SAMPLES]):
                    self._sink.see_digest(self._place(path, index), sample, microbatch)

    def _place(self, name: str, sample: int) -> Place:
        key = (name, sample)
        if key not in self._places:
            self._places[key] = scalar_place("data", name, "input", str(sample))
        return self._places[key]


class Throughput:
    """Seconds per step, data per step, memory after the step.

    ``seconds`` is from the beginning of the schedule to the end of the optimizer; ``interval_seconds`` is the average
    time per step since the last monitored one, including everything between the steps.
    """

    def __init__(self, sink: SeriesSink, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._sink, self._device, self._now = sink, device, now
        self._began = 0.0
        self._last: tuple[int, float] | None = None
        self._places: dict[str, Place] = {}
        self._page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
        try:
            self._statm: Any = open(_STATM, "rb", buffering=0)  # noqa: SIM115 (held open: read every step)
        except OSError:
            self._statm = None

    def begin(self) -> None:
        """The step begins."""
        self._began = self._now()

    def finish(self, step: int, samples: int, tokens: int) -> None:
        """The step is over."""
        now = self._now()
        self._report("seconds", now - self._began)
        if self._last is not None and step > self._last[0]:
            self._report("interval_seconds", (now - self._last[1]) / (step - self._last[0]))
        self._last = (step, now)
        if samples:
            self._report("samples", samples)
        if tokens:
            self._report("tokens", tokens)
        if self._statm is not None:
            self._statm.seek(0)
            self._report("host_bytes", int(self._statm.read().split()[1]) * self._page)
        allocated = device_bytes(self._device)
        if allocated is not None:
            self._report("device_bytes", allocated)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        if self._statm is not None:
            self._statm.close()
            self._statm = None

    def _report(self, name: str, number: float) -> None:
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = scalar_place("throughput", name)
        self._sink.value(place, number)


def device_bytes(device: torch.device) -> int | None:
    """Memory that torch's allocator has handed out on an accelerator; None on the host."""
    if device.type == "cpu":
        return None
    module = sys.modules.get("torch_npu") if device.type == "npu" else torch
    counter = getattr(getattr(module, device.type, None), "memory_allocated", None)
    return int(counter()) if counter is not None else None
