"""Preheat: thresholds of msprobe's ratio learned in the first steps, one for each API and dtype.

The first step that is seen, whatever its number, counts the calls of each API. In the steps after it a walk over the
calls takes a few of them each step, until all were taken once; each of these is also computed on the host, whose
verdict says whether the ratio was that of a healthy call. In forward and in backward. Judging and learning both happen
in the writer thread, in the order of execution, so a threshold does not depend on how far behind that thread is.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from msprobe_megatron.probes.perturb.figures import PLACE
from msprobe_megatron.probes.perturb.verdict import HOST_BALANCE, HOST_LIMITS, RATIOS, Examined

START = 2.05
_FLOOR = 1.0002
_RATIO = PLACE["ratio"]
_ABS, _REL, _BALANCE = PLACE["cpu_abs"], PLACE["cpu_rel"], PLACE["cpu_balance"]


class Walk:
    """Which calls of an API are computed on the host in which step. Belongs to the training thread.

    Example::

        walk = Walk(steps=15, most=20)
        walk.begin()
        walk.takes("torch.matmul")       # False in the first step, which only counts
    """

    def __init__(self, steps: int, most: int) -> None:
        self._steps, self._most = steps, most
        self._counts: dict[str, int] = defaultdict(int)
        self._calls: dict[str, int] = {}
        self.round = -1

    def begin(self) -> None:
        """A step begins."""
        if self.round == 0:
            self._calls = dict(self._counts)
        self.round += 1
        self._counts.clear()

    @property
    def learning(self) -> bool:
        """Whether thresholds are still being learned."""
        return self.round < self._steps

    def takes(self, api: str) -> bool:
        """Count a call of this step; whether it is one that the host computes too."""
        self._counts[api] += 1
        calls = self._calls.get(api, 0)
        if not calls or not 1 <= self.round < self._steps:
            return False
        number, rounds = self._counts[api] - 1, max(self._steps - 1, 1)
        taken = min(calls, rounds * self._most)
        # Where `most` allows fewer than all, those that are taken are spread over the whole step.
        sample = number * taken // calls
        if number >= calls or (number + 1) * taken // calls == sample:
            return False
        return sample % rounds == self.round - 1


class Preheat:
    """Thresholds by API and dtype. Belongs to the writer thread.

    Example::

        preheat = Preheat()
        preheat.threshold(examined)       # 2.05 before anything was learned
    """

    def __init__(self) -> None:
        self.thresholds: dict[tuple[str, str], float] = {}
        self._done: set[tuple[str, str]] = set()
        self._good: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._bad: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._step = -1

    def threshold(self, seen: Examined) -> float:
        """The threshold that a result is judged by now."""
        if seen.step != self._step:
            self._learn()
            self._step = seen.step
        return self.thresholds.get((seen.api, seen.dtype), START)

    def saw(self, seen: Examined, line: npt.NDArray[np.float64]) -> None:
        """Take note of a result that the host has computed too."""
        if not len(line) or math.isnan(line[_BALANCE]):
            return
        limit = HOST_LIMITS.get(seen.dtype, HOST_LIMITS["float32"])
        off = [line[_ABS] / limit, line[_REL] / limit, abs(line[_BALANCE]) / HOST_BALANCE]
        healthy = all(not part > 1 for part in off)
        (self._good if healthy else self._bad)[seen.api, seen.dtype].append(float(line[_RATIO]))

    def _learn(self) -> None:
        for key in {*self._good, *self._bad} - self._done:
            good, bad = self._good.get(key, []), self._bad.get(key, [])
            now = self.thresholds.get(key, START)
            if not bad:
                now = 1 + 2 * (now - 1) if max(good) > now else 1 + (now - 1) / 2
            elif not good or min(bad) > max(good):
                now = min(*bad, now)
                self._done.add(key)
            self.thresholds[key] = max(now, RATIOS.get(key[1], _FLOOR))
        self._good.clear()
        self._bad.clear()
