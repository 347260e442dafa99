"""Site: how the job is getting on: learning rate, gradient norm, skipped steps, data, time and memory.

Numbers that the host knows without asking a device, and a look at the arguments of the model. Nothing here waits.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from msprobe_megatron.clock import Clock
from msprobe_megatron.sites.arguments import Found, named_arguments, own_work
from msprobe_megatron.sites.modules import parameter_names
from msprobe_megatron.topology import names
from msprobe_megatron.topology.optimizers import leaves
from msprobe_megatron.topology.places import Place
from msprobe_megatron.topology.shards import ShardSpec

_MOST_SAMPLES = 64
"""Samples of a microbatch that have a digest of their own."""
_TOKENS = 2  # dimensions of token ids: samples, positions
_STATM = "/proc/self/statm"
Fault = Callable[[BaseException, str], None]


class Sink(Protocol):
    """Who is told of numbers."""

    def see(self, place: Place, tensor: torch.Tensor, microbatch: int | None, phase: str) -> None:
        """Take note of a tensor, now."""

    def see_digest(self, place: Place, tensor: torch.Tensor, microbatch: int | None) -> None:
        """Take note of a tensor and of the digest of its elements, now."""

    def value(self, place: Place, number: float, microbatch: int | None = None) -> int:
        """Take note of a number."""


def scalar_place(kind: str, name: str, io: str = "value", path: str = "", op: str = "", vpp: int = 0) -> Place:
    """The place of a number that belongs to the whole rank.

    Example::

        scalar_place("scalar", "learning_rate")
    """
    spec = ShardSpec.unmergeable("a number of this rank")
    return Place(kind, name, io, path, op, vpp, -1, lambda shape: spec, lambda axis: 1)


class Scalars:
    """Learning rate, loss scale, gradient norm, skipped steps.

    Example::

        scalars = Scalars(optimizer, probe)
        scalars.before_step(); result = optimizer.step(); scalars.after_step(result)
    """

    def __init__(self, optimizer: Any, sink: Sink) -> None:
        self._optimizer, self._sink = optimizer, sink
        self._rates: dict[str, Place] = {}
        self._scale, self._skipped = scalar_place("scalar", "loss_scale"), scalar_place("scalar", "skipped")
        self._norm = scalar_place("loss", "grad_norm")

    def before_step(self) -> None:
        """The optimizer is about to step with these settings."""
        rates = [group.get("lr") for leaf in leaves(self._optimizer) for group in _groups(leaf)]
        # Most groups have the same rate: a row for each only where they differ.
        some = rates[:1] if all(rate is rates[0] or _same(rate, rates[0]) for rate in rates) else rates
        for index, rate in enumerate(some):
            path = str(index) if len(some) > 1 else ""
            place = self._rates.get(path)
            if place is None:
                place = self._rates[path] = scalar_place("scalar", "learning_rate", path=path)
            self._tell(place, rate)
        getter = getattr(self._optimizer, "get_loss_scale", None)
        if getter is not None:
            self._tell(self._scale, getter())

    def after_step(self, result: Any) -> None:
        """The optimizer returned `result`: of Megatron's, whether it has stepped, and the norm of the gradient."""
        if isinstance(result, tuple) and result:
            success = result[0]
            if isinstance(success, bool):
                self._sink.value(self._skipped, not success)
            if len(result) > 1:
                self._tell(self._norm, result[1])

    def _tell(self, place: Place, number: Any) -> None:
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


class Arguments:
    """What the model is called with: how much data, and on request the digest of every sample's token ids.

    Example::

        arguments = Arguments(chunks, probe, clock, fault, digests=True)
        arguments.install(); ...; arguments.samples, arguments.tokens
    """

    def __init__(
        self, chunks: Sequence[nn.Module], sink: Sink, clock: Clock, fault: Fault, *, digests: bool = False
    ) -> None:
        # The first chunk sees every microbatch once.
        self._model = names.unwrap(chunks[0])
        self._names = parameter_names(self._model)
        self._sink, self._clock, self._fault, self._digests = sink, clock, fault, digests
        self._places: dict[tuple[str, int], Place] = {}
        self._handle: Any = None
        self._active = False
        self.samples = self.tokens = 0

    def install(self) -> None:
        """Begin to see calls; a hook that is still there is used again."""
        self._active, self.samples, self.tokens = True, 0, 0
        if self._handle is None:
            self._handle = self._model.register_forward_pre_hook(self._called, with_kwargs=True)

    def pause(self) -> None:
        """See nothing; leave the hook."""
        self._active = False

    def resume(self) -> None:
        """See again."""
        self._active = True

    def remove(self) -> None:
        """Take the hook away. Safe to call twice."""
        self._active = False
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if not self._active or kwargs is None or (self._clock.away and self._clock.apart()):
            return
        try:
            phase, moment = self._clock.calling()
            if phase == "forward":
                with own_work():
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
    """Seconds of a step, data in it, memory after it.

    ``seconds`` is from the beginning of the schedule to the end of the optimizer; ``interval_seconds`` is what a step
    took on average since the last watched one, everything between the steps included.

    Example::

        throughput = Throughput(probe, device)
        throughput.begin(); ...; throughput.finish(step=10, samples=8, tokens=4096)
    """

    def __init__(self, sink: Sink, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._sink, self._device, self._now = sink, device, now
        self._began = 0.0
        self._last: tuple[int, float] | None = None
        self._places: dict[str, Place] = {}
        self._page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
        try:
            self._statm: Any = open(_STATM, "rb", buffering=0)  # noqa: SIM115 (held open: read once a step)
        except OSError:
            self._statm = None

    def begin(self) -> None:
        """The step begins."""
        self._began = self._now()

    def finish(self, step: int, samples: int, tokens: int) -> None:
        """The step is over."""
        now = self._now()
        self._tell("seconds", now - self._began)
        if self._last is not None and step > self._last[0]:
            self._tell("interval_seconds", (now - self._last[1]) / (step - self._last[0]))
        self._last = (step, now)
        if samples:
            self._tell("samples", samples)
        if tokens:
            self._tell("tokens", tokens)
        if self._statm is not None:
            self._statm.seek(0)
            self._tell("host_bytes", int(self._statm.read().split()[1]) * self._page)
        allocated = device_bytes(self._device)
        if allocated is not None:
            self._tell("device_bytes", allocated)

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        if self._statm is not None:
            self._statm.close()
            self._statm = None

    def _tell(self, name: str, number: float) -> None:
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = scalar_place("throughput", name)
        self._sink.value(place, number)


def device_bytes(device: torch.device) -> int | None:
    """Memory that torch has allocated on an accelerator, from its own books; None on the host."""
    if device.type == "cpu":
        return None
    module = sys.modules.get("torch_npu") if device.type == "npu" else torch
    counter = getattr(getattr(module, device.type, None), "memory_allocated", None)
    return int(counter()) if counter is not None else None
