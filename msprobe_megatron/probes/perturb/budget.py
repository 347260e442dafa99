"""Which calls are examined in which step, so that all are in a few steps and none costs more than its share.

From a step in which calls are only seen, with the shapes of their tensors: what a call costs and what examining it
would cost, by a model of the machine that knows no clock. So all ranks that run the same calls come to the same plan,
and none of them waits for another that examines more. A call belongs to a step by a hash of its name. Shapes that
depend on the data (tokens of an expert) do not enter the plan.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

import torch

from msprobe_megatron.probes.perturb.sampling import terms_of

# Microseconds of a call that computes nothing, and of examining one, the hooks of its module included.
_CALL, _EXAMINED = 5.0, 600.0
# Bytes and multiply-adds a microsecond, rather too fast than too slow: then a step seems short, and its share small.
_SPEED = {"cpu": (4e4, 6e4)}
_FAST = (1e6, 1e8)
_BACKWARD = 3.0
_ROWS_ONLY = 4 * _EXAMINED
# Calls are not spread evenly over steps, and files are written too.
_MARGIN = 0.7
_EXPERT = re.compile(r"experts\.\d+")


class Cost(NamedTuple):
    """Microseconds that a call takes by itself, and that its examination would."""

    call: float
    examined: float


def cost_of(
    kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, device: str, stage: str, api: str = ""
) -> Cost:
    """What a call and its examination cost, from the shapes of its tensors.

    Example::

        cost_of("elementwise", (x,), {}, y, "cpu", "forward")
    """
    tensors = [t for t in (*args, *kwargs.values(), result) if isinstance(t, torch.Tensor)]
    moved = sum(t.numel() * t.element_size() for t in tensors)
    out = result.numel() if isinstance(result, torch.Tensor) else 0
    terms = terms_of(kind, args, result, api) if kind == "gemm" and isinstance(result, torch.Tensor) else 1
    by_bytes, by_products = _SPEED.get(device, _FAST)
    slow = 1.5 if kind in ("softmax", "norm", "elementwise") and device == "cpu" else 1.0
    products = out * terms / by_products if kind == "gemm" else 0.0
    own = _CALL + slow * moved / by_bytes + products
    # What is examined is taken to be slow where its speed is uncertain, what is not to be fast.
    again = (_CALL + 4 * slow * moved / by_bytes + products) * (_BACKWARD if stage == "backward" else 1.0)
    return Cost(own, _EXAMINED + 2.5 * again + 4 * moved / by_bytes)


class Plan:
    """The calls of each step of a round.

    Example::

        plan = Plan(costs, share=0.05, microbatches=8)
        plan.chosen(0)         # names of the calls of the first step after the one that was only seen
    """

    def __init__(self, costs: dict[str, Cost], share: float, microbatches: int = 1) -> None:
        fixed = {name: cost for name, cost in costs.items() if not _EXPERT.search(name)}
        # A call of the forward has a backward of twice its cost; one of the backward itself is two thirds of its like.
        weights = {name: _BACKWARD / 2 if "/backward/" in name else _BACKWARD for name in fixed}
        step = microbatches * sum(weights[name] * (cost.call + _CALL) for name, cost in fixed.items())
        self.step_microseconds = step
        self.limit = _MARGIN * share * step
        # A call whose repetition alone would take the share of a step is examined by its rows only.
        self._large = {name for name, cost in fixed.items() if cost.examined - _EXAMINED > self.limit}
        needed = sum(_ROWS_ONLY if name in self._large else cost.examined for name, cost in fixed.items())
        self.rounds = _round_up(max(1.0, needed / max(self.limit, 1e-9)))
        self.microbatches = microbatches
        self._bins: list[list[str]] = [[] for _ in range(self.rounds)]
        for name in costs:
            self._bins[_place(name, self.rounds)].append(name)

    def chosen(self, ordinal: int) -> frozenset[str]:
        """Names of the calls for the ``ordinal``-th step of the run."""
        return frozenset(self._bins[ordinal % self.rounds])

    def microbatch(self, ordinal: int) -> int:
        """The microbatch of a step that is looked at: another one each round."""
        return (ordinal // self.rounds) % self.microbatches

    def whole(self, name: str) -> bool:
        """Whether there is time to repeat all of this call."""
        return name not in self._large


def _place(name: str, rounds: int) -> int:
    # Experts are numbered over all ranks; ranks of one group hold different ones at the same place.
    word = hashlib.blake2b(_EXPERT.sub("experts", name).encode(), digest_size=8).digest()
    return int.from_bytes(word, "little") % rounds


def _round_up(number: float) -> int:
    """Up to 1, 2, 3, 4, 6, 8, 12, …: ranks whose costs differ a little agree."""
    power = 1
    while True:
        for candidate in (power, power * 3 // 2 if power > 1 else power):
            if candidate >= number:
                return candidate
        power *= 2
