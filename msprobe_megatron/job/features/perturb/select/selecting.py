"""Which calls are examined in which step: by the probe file (`Selection`), and within the budget (`Schedule`).

The first step is a survey: calls are only observed, with the shapes of their tensors. From these a machine model, not a
clock, estimates what each call costs and what examining it would cost. Ranks that run the same calls come to the same
schedule, so no rank waits for another that examines more. A call belongs to a step by a hash of its name. Shapes that
depend on the data (tokens of an expert) do not enter the schedule.

The survey also compares constants: layers of one model run the same code, so a call that gets another constant in one
layer than in nearly all others is suspicious. That needs no second run.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from msprobe_megatron.config import PerturbConfig
from msprobe_megatron.config.name_patterns import name_matcher
from msprobe_megatron.job.features.perturb.judge.tolerance import class_of, short_name
from msprobe_megatron.job.features.perturb.select.sampling import terms_of
from msprobe_megatron.topology.layers import layer_of

_GROUPS = (("torch.nn.functional.", "Functional"), ("torch.Tensor.", "Tensor"), ("torch.", "Torch"))
# Microseconds of a call that computes nothing, and of examining one, the hooks of its module included.
_CALL, _EXAMINED = 5.0, 600.0
# Bytes and multiply-adds per microsecond. Rather too fast than too slow: a step then seems short, and its share small.
_SPEED = {"cpu": (4e4, 6e4)}
_FAST = (1e6, 1e8)
_BACKWARD = 3.0
_ROWS_ONLY = 4 * _EXAMINED
# Calls are not spread evenly over steps, and files are written too.
_MARGIN = 0.7
_EXPERT = re.compile(r"experts\.\d+")
_LAYER = re.compile(r"(^|\.)layers\.\d+")
_FEWEST_LAYERS = 3


def msprobe_name(api: str, number: int, stage: str) -> str:
    """Name of a call in msprobe's notation.

    Example::

        >>> msprobe_name("torch.nn.functional.softmax", 3, "forward")
        'Functional.softmax.3.forward'
    """
    group = next((name for prefix, name in _GROUPS if api.startswith(prefix)), "Aten")
    bare = api.rpartition(".")[2] if api.startswith("torch.") else short_name(api)
    return f"{group}.{bare}.{number}.{stage}"


def call_name(module: str, api: str, number: int) -> str:
    """Name of a call in rows: the module it is made in, the API, and its number among the module's calls of that API.

    Example::

        >>> call_name("decoder.layers.0.mlp", "torch.nn.functional.silu", 0)
        'decoder.layers.0.mlp/torch.nn.functional.silu.0'
    """
    return f"{module}/{api}.{number}"


class Selection:
    """The selection of the `perturb` section; remembers which of its patterns have matched.

    Example::

        >>> chosen = Selection(PerturbConfig(list=("softmax",)))
        >>> chosen.call("decoder.layers.0.mlp", "torch.softmax", 0, 0)
        True
    """

    def __init__(self, config: PerturbConfig) -> None:
        self._config = config
        self._calls = {text: _matcher(text) for text in config.list}
        self._modules = {text: _matcher(text) for text in config.modules}
        self._scope = frozenset(config.scope)
        self.matched: set[str] = set()

    def place(self, module: str, microbatch: int) -> bool:
        """Whether layer and microbatch are selected; modules outside of layers always are."""
        layers, microbatches = self._config.layers, self._config.microbatches
        if microbatches is not None and microbatch not in microbatches:
            return False
        return layers is None or (layer := layer_of(module)) is None or layer in layers

    def call(self, module: str, api: str, number: int, in_step: int) -> bool:
        """Whether a call is selected: ``number`` counts within its module, ``in_step`` within the step."""
        if self._config.whole:
            return True
        if self._scope:
            name = call_name(module, api, number)
            theirs = msprobe_name(api, in_step, self._config.stage)
            hits = self._scope & {name, theirs}
            self.matched |= hits
            return bool(hits)
        return self._hit(self._calls, api, call_name(module, api, number))

    def module(self, name: str) -> bool:
        """Whether a module is selected to be examined as one operator."""
        return self._hit(self._modules, name.rpartition(".")[2], name)

    def _hit(self, patterns: dict[str, Callable[[str, str], bool]], short: str, full: str) -> bool:
        hits = [text for text, matches in patterns.items() if matches(short, full)]
        self.matched.update(hits)
        return bool(hits)

    def unmatched(self) -> list[str]:
        """Patterns that have matched nothing."""
        return [text for text in (*self._calls, *self._modules, *self._scope) if text not in self.matched]


def _matcher(text: str) -> Callable[[str, str], bool]:
    """A plain word is matched against the short name; `/regex/` and parts with a dot or slash against the full name."""
    matches = name_matcher(text)
    if "." in text or "/" in text:
        return lambda short, full: matches(full)
    return lambda short, full: matches(short)


@dataclass(frozen=True)
class StepPlan:
    """What the examiner does in one step."""

    calls: frozenset[str] | None = None
    """Names of the calls and modules to examine; None: all that the probe file selects."""
    modules: frozenset[str] | None = None
    """Modules whose calls are handed over; None: all, and calls outside of modules."""
    microbatch: int | None = None
    """The only microbatch that is examined; None: all that the probe file selects."""
    rows_only: frozenset[str] = frozenset()
    """Calls that are too expensive to repeat as a whole."""
    survey: Survey | None = None
    """Collects costs and constants of the calls, in the first step."""
    examine: bool = True
    """False: calls are only observed by the survey."""


class Cost(NamedTuple):
    """Microseconds that a call takes, and that its examination would take."""

    call: float
    examined: float


def cost_of(
    kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str, stage: str, api: str = ""
) -> Cost:
    """Estimated cost of a call and of its examination, from the shapes of its tensors."""
    tensors = [t for t in (*args, *kwargs.values(), result) if isinstance(t, torch.Tensor)]
    moved = sum(t.numel() * t.element_size() for t in tensors)
    out = result.numel() if isinstance(result, torch.Tensor) else 0
    terms = terms_of(kind, args, result, api) if kind == "gemm" and isinstance(result, torch.Tensor) else 1
    by_bytes, by_products = _SPEED.get(device, _FAST)
    slow = 1.5 if kind in ("softmax", "norm", "elementwise") and device == "cpu" else 1.0
    products = out * terms / by_products if kind == "gemm" else 0.0
    own = _CALL + slow * moved / by_bytes + products
    # Pessimistic for what is examined and optimistic for what is not, where the speed is uncertain.
    again = (_CALL + 4 * slow * moved / by_bytes + products) * (_BACKWARD if stage == "backward" else 1.0)
    return Cost(own, _EXAMINED + 2.5 * again + 4 * moved / by_bytes)


class Survey:
    """Costs and constants of the calls of the first step."""

    def __init__(self, device: str, stage: str, *, costs: bool) -> None:
        self._device, self._stage, self._wants_costs = device, stage, costs
        self.costs: dict[str, Cost] = {}
        self.constants = LayerConstants()
        self.microbatches = 1

    def add(
        self,
        name: str,
        api: str,
        phase: str,
        microbatch: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Take note of a call that has just been made."""
        if phase == "forward":
            self.constants.add(name, api, args, kwargs)
        # In stage backward a forward call counts only if a gradient will come through it.
        has_backward = isinstance(result, torch.Tensor) and result.grad_fn is not None
        if self._wants_costs and (self._stage == "forward" or phase == "backward" or has_backward):
            self.microbatches = max(self.microbatches, microbatch + 1)
            if name not in self.costs:
                self.costs[name] = cost_of(class_of(api), args, kwargs, result, self._device, self._stage, api)


class Schedule:
    """Spreads the calls over a round of steps; each round examines every call once, in another microbatch."""

    def __init__(self, costs: dict[str, Cost], share: float, microbatches: int = 1) -> None:
        fixed = {name: cost for name, cost in costs.items() if not _EXPERT.search(name)}
        # A forward call has a backward of twice its cost; a call of the backward is two thirds of the whole.
        weights = {name: _BACKWARD / 2 if "/backward/" in name else _BACKWARD for name in fixed}
        step = microbatches * sum(weights[name] * (cost.call + _CALL) for name, cost in fixed.items())
        self.limit = _MARGIN * share * step
        """Microseconds per step."""
        # A call whose repetition alone would take the share of a step is examined by its rows only.
        self._large = frozenset(name for name, cost in fixed.items() if cost.examined - _EXAMINED > self.limit)
        needed = sum(_ROWS_ONLY if name in self._large else cost.examined for name, cost in fixed.items())
        self.round_length = _round_up(max(1.0, needed / max(self.limit, 1e-9)))
        self.microbatches = microbatches
        self._steps: list[list[str]] = [[] for _ in range(self.round_length)]
        for name in costs:
            self._steps[_step_of(name, self.round_length)].append(name)

    def step(self, ordinal: int) -> StepPlan:
        """The plan of the ``ordinal``-th step after the survey."""
        calls = frozenset(self._steps[ordinal % self.round_length])
        return StepPlan(
            calls=calls,
            modules=frozenset(name.partition("/")[0] for name in calls),
            microbatch=(ordinal // self.round_length) % self.microbatches,
            rows_only=self._large,
        )


def _step_of(name: str, steps: int) -> int:
    # Experts are numbered over all ranks; ranks of one group hold different ones at the same place.
    word = hashlib.blake2b(_EXPERT.sub("experts", name).encode(), digest_size=8).digest()
    return int.from_bytes(word, "little") % steps


def _round_up(number: float) -> int:
    """Up to 1, 2, 3, 4, 6, 8, 12, …, so that ranks whose costs differ a little agree."""
    power = 1
    while True:
        for candidate in (power, power * 3 // 2 if power > 1 else power):
            if candidate >= number:
                return candidate
        power *= 2


class ConstantOutlier(NamedTuple):
    """A call, the constants it gets, and those that the same call gets in the other layers."""

    name: str
    api: str
    constants: tuple[float | str, ...]
    others: tuple[float | str, ...]
    layers: int


class LayerConstants:
    """The floating-point constants among the arguments of calls, and the form of a GELU, compared across layers."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[str, tuple[str, tuple[float | str, ...]]]] = defaultdict(dict)

    def add(self, name: str, api: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a call; only the first of its name counts."""
        if layer_of(name.partition("/")[0]) is None:
            return
        any_layer = _LAYER.sub(r"\1layers.*", name, count=1)
        constants: tuple[float | str, ...] = tuple(v for v in (*args, *kwargs.values()) if type(v) is float)
        if short_name(api) == "gelu":  # the form of it is a word, and has a default
            constants = (*constants, str(kwargs.get("approximate", "none")))
        self._calls[any_layer].setdefault(name, (api, constants))

    def outliers(self) -> list[ConstantOutlier]:
        """Calls that differ from those of nearly all other layers; none where layers differ among themselves."""
        found = []
        for calls in self._calls.values():
            counts = Counter(constants for _, constants in calls.values())
            usual, votes = counts.most_common(1)[0]
            # Rates that grow with depth, or scales by layer number, differ in every layer.
            if votes < _FEWEST_LAYERS or votes < math.ceil(len(calls) * 2 / 3):
                continue
            found += [
                ConstantOutlier(name, api, constants, usual, votes)
                for name, (api, constants) in calls.items()
                if constants != usual and len(constants) == len(usual)
            ]
        return found
