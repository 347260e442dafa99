"""Python interface of the compiled hot path: tensor cache, row writer, module hooks, API calls.

The C++ classes of `module.cpp` do the same as `measure.once`, `module.modules` and `calls.api`, at a fraction of the
cost, for plain tensors of the memory that the slots are in. What differs by device is how a slot is filled: in host
memory by the compiled kernel, elsewhere by the operator ``msprobe::measure_into_slot``. They handle a tensor, a hook or
a call completely or leave it completely to the Python code they were made with, so where there is no compiler, or where
torch compiles the backward (which then accepts only Python hooks), nothing but the speed changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, Protocol

import torch
from torch import nn

from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.measure.measurer import Measurer
from msprobe_megatron.job.measure.stats import REAL
from msprobe_megatron.job.sites.calls.arguments import NO_TENSORS, find_tensors
from msprobe_megatron.job.sites.calls.naming import OUTSIDE, Fault, ModuleFrames
from msprobe_megatron.job.sites.compiled import loader
from msprobe_megatron.job.sites.compiled.loader import NO_ROOM, UNSUPPORTED
from msprobe_megatron.job.sites.module.hooks import See as SeeGradient
from msprobe_megatron.job.sites.module.hooks import await_gradient
from msprobe_megatron.topology.shards import Place

__all__ = [
    "NO_ROOM",
    "UNSUPPORTED",
    "CompiledCalls",
    "Helpers",
    "PlainState",
    "RowWriter",
    "See",
    "State",
    "TensorCache",
    "Watch",
    "backward_is_traced",
    "may_hold_tensors",
    "new_calls",
    "new_hook",
    "new_watch",
    "row_writer",
    "tensor_caches",
]

See = Callable[[Any, torch.Tensor, int | None, str], None]


class TensorCache(Protocol):
    """The tensors that one step has measured; holds no tensor and keeps no storage alive."""

    def see(self, x: torch.Tensor) -> int:
        """The slot with the statistics of ``x`` as it is now, or NO_ROOM (no free slot), or UNSUPPORTED."""

    def forget_all(self) -> None:
        """Invalidate all entries: memory was written without a change of version counters."""

    def __len__(self) -> int:
        """Number of entries."""


class RowWriter(Protocol):
    """Writes rows to the page of the running step."""

    def __call__(self, place: Any, tensor: torch.Tensor, microbatch: int | None, phase: str, /) -> None:
        """Measure a tensor, unless the cache has it, and write its row."""

    def new_page(self, tensors: TensorCache = ..., weights: TensorCache = ..., cells: list[Any] = ..., /) -> None:
        """Write to a new page, with caches for tensors and for parameters; without arguments: close the page."""


class Slots(Protocol):
    """Where statistics go: the part of `record.slots.SlotTable` that is needed here."""

    def count_by(self, restart: Callable[[], Iterator[int]]) -> None:
        """Take slot numbers from this counter."""

    def grow(self, slot: int) -> int:
        """Allocate memory for a slot."""


def tensor_caches(measurer: Measurer, slots: Slots) -> Callable[[], TensorCache] | None:
    """Factory of tensor caches, one per step, that measure into a slot table; None without the compiled module."""
    compiled = measurer.compiled
    if compiled is None and measurer.device.type == "cpu":
        return None
    module = loader.load()
    if module is None:
        return None
    codes = compiled.codes if compiled is not None else dict.fromkeys(REAL, (0, 0))
    with torch.inference_mode(False), torch.no_grad():
        samples = [(torch.empty(0, dtype=dtype, device="cpu"), code, values) for dtype, (code, values) in codes.items()]
        there = torch.empty(0, dtype=torch.int64, device=measurer.device)
    kinds = (torch.Tensor, torch.nn.Parameter)
    counter = module.Counter()
    slots.count_by(counter.restart)
    kernel = loader.kernel_addresses()
    more: tuple[Any, ...]
    if compiled is not None:
        # `compiled` owns the value tables of 8-bit dtypes, so it must live as long as the context.
        more = (measurer.addresses, *kernel, *kinds, samples, compiled)
    else:
        more = (measurer.rows, *kernel, *kinds, samples, None, there, measurer.wide)
    context = module.MeasureContext(counter, slots.grow, *more)
    return lambda: module.TensorCache(context)


def row_writer(
    clock: Any,
    describe: Callable[[Any, torch.Tensor], tuple[Any, ...] | None],
    slow: See,
    late: Callable[[int], None],
) -> RowWriter:
    """A writer that measures a tensor and writes its row in one compiled call; rows are numbered by ``clock.seq``.

    ``describe(place, tensor)`` gives what the rows of a place have in common as long as shape, strides and dtype stay:
    layout, name of the dtype, extra, number of the numbering, cells as `measure_into_slot` takes them, address of the
    plan (0 without numbers, and on a device, where the operator takes the number and the cells), and the owner of the
    plan; or None.
    ``slow`` is the fallback for what is not supported; ``late`` is called with a slot whose page is already closed.
    """
    made: RowWriter = loader.module().RowWriter(clock, describe, slow, late)  # type: ignore[union-attr]
    return made


class Watch(Protocol):
    """State shared by all hooks of a module site."""

    active: bool
    traced: bool
    round: int
    see: See
    see_gradient: SeeGradient


def new_watch(
    clock: Clock,
    see: See,
    fault: Fault,
    gradient_fault: Callable[[BaseException, Place], None],
    stacks: bool,
    sides: tuple[bool, bool, bool, bool],
    biases: bool,
) -> Watch | None:
    """The shared state that hooks are made with; None without the compiled module.

    `sides`: whether inputs and outputs of the forward, and of the backward, are reported to `see`; `biases`: whether
    parameters among the outputs are. With `stacks` the first call of every module is left to Python.
    """
    module = loader.module()
    if module is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        sample = torch.empty(0, device="cpu")
    kinds = (torch.Tensor, nn.Parameter, sample)
    made: Watch = module.Watch(
        clock, see, fault, gradient_fault, may_hold_tensors, await_gradient, *kinds, stacks, *sides, biases
    )
    return made


def new_hook(
    watch: Watch,
    watched: Any,
    slow: Callable[..., None],
    parameters: tuple[str, ...],
    make: Callable[[str], tuple[Any, ...]],
    what: str,
    *,
    after: bool,
) -> Callable[..., None]:
    """A hook before or after the forward of a module.

    `watched` counts the calls of the module (`calls`, `current`), `make(path)` gives the places of a tensor, `what`
    names the hook in a fault, `slow` is the Python hook it falls back to.
    """
    made: Callable[..., None] = loader.module().Hook(watch, watched, slow, parameters, make, what, after)  # type: ignore[union-attr]
    return made


def backward_is_traced() -> bool:
    """Whether torch compiles the backward: it then accepts only Python hooks."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    configured = getattr(getattr(dynamo, "config", None), "compiled_autograd", False)
    return bool(configured or getattr(getattr(dynamo, "compiled_autograd", None), "compiled_autograd_enabled", False))


def may_hold_tensors(kind: type) -> bool:
    """Whether a value of this type can be or hold a tensor that `find_tensors` finds."""
    if kind in NO_TENSORS:
        return False
    return issubclass(kind, torch.Tensor | tuple | list | dict) or is_dataclass(kind)


class State(Protocol):
    """State of an API site: whether it reports calls, how many reported calls it is inside of, and the round."""

    active: bool
    traced: bool
    inside: int
    round: int
    fired: int
    see: Callable[..., None]


class PlainState:
    """`State` without the compiled module."""

    def __init__(self, see: Callable[..., None]) -> None:
        self.see = see
        self.active = self.traced = False
        self.inside = self.round = self.fired = 0


class CompiledCalls(State, Protocol):
    """Replaces the `__torch_function__` of a mode, which is its first argument."""

    def __call__(self, mode: Any, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle a call of torch."""

    def run(
        self, api: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], inside: int
    ) -> Any:
        """Handle any other call under this name; with `inside` 1 calls made inside it are not reported."""

    def known(self) -> int:
        """How many numbered calls are known."""


@dataclass(frozen=True)
class Helpers:
    """Python functions that compiled calls need.

    `names` gives the name of a function or None, `new_call(module, chunk, api, number)` the places of a call that is
    seen for the first time, `unread(call, args, kwargs)` the arguments it does not read, `shares` accumulates the
    gradient of an input that is used several times, `hook(node, cells)` sets a Python hook, `slow` is the
    fallback: the mode's own method.
    """

    fault: Fault
    names: dict[Any, str | None]
    new_call: Callable[[str, int, str, int], Any]
    unread: Callable[[Any, tuple[Any, ...], dict[str, Any] | None], tuple[str, ...]]
    shares: type
    hook: Callable[[Any, list[Any]], None]
    slow: Callable[..., Any]


def new_calls(
    clock: Clock,
    see: Callable[..., None],
    frames: ModuleFrames,
    helpers: Helpers,
    sides: tuple[bool, bool, bool, bool],
) -> CompiledCalls | None:
    """The compiled handler of API calls; None without the compiled module.

    `sides`: whether inputs and outputs of the forward, and of the backward, are reported to `see`.
    """
    module = loader.module()
    if module is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        sample = torch.empty(0, device="cpu")
    needed = (
        clock,
        helpers.fault,
        helpers.names,
        frames.here,
        frames.outside,
        helpers.new_call,
        helpers.unread,
        find_tensors,
        may_hold_tensors,
        helpers.shares,
        helpers.hook,
        helpers.slow,
    )
    made: CompiledCalls = module.Calls(see, needed, torch.Tensor, nn.Parameter, sample, OUTSIDE, *sides)
    return made
