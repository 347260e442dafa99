"""The API calls, compiled: the same as in `api` and `api_edges`, at a fraction of the cost.

They are there where the compiled look is. A call is done whole there, or left whole to the site in Python: where torch
compiles the backward, which then takes no hooks but those of Python, and where there is no compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from msprobe_megatron import native
from msprobe_megatron.clock import Clock
from msprobe_megatron.sites.api_edges import Shares
from msprobe_megatron.sites.arguments import find_tensors
from msprobe_megatron.sites.compiled_hooks import may_hold_tensors
from msprobe_megatron.sites.frames import ModuleFrames


class State(Protocol):
    """How it stands with a site: whether it tells of calls, inside of how many recorded ones it is, for which step."""

    active: bool
    traced: bool
    inside: int
    round: int
    fired: int
    see: Callable[..., None]


class PlainState:
    """The same where nothing is compiled."""

    def __init__(self, see: Callable[..., None]) -> None:
        self.see = see
        self.active = self.traced = False
        self.inside = self.round = self.fired = 0


class CompiledCalls(State, Protocol):
    """Sees calls as the `__torch_function__` of a mode does, which is its first argument."""

    def __call__(self, mode: Any, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call of torch."""

    def run(
        self, api: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], inside: int
    ) -> Any:
        """Any other call, under this name; with `inside` 1 those that it makes are not told."""

    def known(self) -> int:
        """How many numbered calls have been met so far."""


@dataclass(frozen=True)
class Helpers:
    """What compiled calls ask Python for.

    `names` gives the name of a function or None, `new_call(module, chunk, api, number)` the places of a call that is
    seen for the first time, `hook(node, cells)` sets a hook of Python, `slow` is the mode's own way.
    """

    fault: Callable[[BaseException, str], None]
    names: dict[Any, str | None]
    new_call: Callable[[str, int, str, int], Any]
    hook: Callable[[Any, list[Any]], None]
    slow: Callable[..., Any]


def new_calls(
    clock: Clock,
    see: Callable[..., None],
    frames: ModuleFrames,
    outside: str,
    helpers: Helpers,
    sides: tuple[bool, bool, bool, bool],
) -> CompiledCalls | None:
    """What sees the calls of a site; None where there is no compiled one.

    `outside` is the name that stands for a module where none is running. `sides`: whether inputs and outputs of the
    forward, and of the backward, are told to `see`.

    Example::

        calls = new_calls(clock, probe.see, frames, "outside", helpers, (True, True, True, True))
    """
    module = native.look()
    if module is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        sample = torch.empty(0, device="cpu")
    asked = (
        *(clock, helpers.fault, helpers.names, frames.here, frames.outside, helpers.new_call),
        *(find_tensors, may_hold_tensors, Shares, helpers.hook, helpers.slow),
    )
    made: CompiledCalls = module.Calls(see, asked, torch.Tensor, nn.Parameter, sample, outside, *sides)
    return made
