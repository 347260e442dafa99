"""The last values of every series: a ring a series, from which median and median deviation are taken.

Both are the same whatever one value in the window is, so that one bad step neither raises the bar nor blinds the rule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from msprobe_megatron.probes.alerts.seen import Floats, Numbers

_ROBUST = 1.4826
"""Median absolute deviation to standard deviation, for values that are normally distributed."""


class Usual(NamedTuple):
    """What is usual for each asked series: how many values say so, their median and robust standard deviation."""

    values: Numbers
    median: Floats
    deviation: Floats


class History:
    """Rings of the last `window` finite values; memory is `series` x `window` numbers of eight bytes.

    Example::

        history = History(window=32)
        history.add(np.array([0, 1, 0]), np.array([1.5, 2.0, np.nan]))
        history.usual(np.array([0, 1])).median
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._values = np.full((0, window), np.inf)
        self._total = np.zeros(0, np.int64)

    def add(self, series: Numbers, values: Floats) -> None:
        """Take up values, in order; those that are not finite, or of series -1, are left out."""
        keep = (series >= 0) & np.isfinite(values)
        series, values = series[keep], values[keep]
        if not len(series):
            return
        self._grow(int(series.max()) + 1)
        order = np.argsort(series, kind="stable")
        series, values = series[order], values[order]
        first = np.flatnonzero(np.diff(series, prepend=-1))
        counts = np.diff(np.append(first, len(series)))
        within = np.arange(len(series)) - np.repeat(first, counts)
        # Of more values than the ring has room for, the last ones stay.
        last = within >= np.repeat(counts, counts) - self.window
        places = (self._total[series] + within) % self.window
        self._values[series[last], places[last]] = values[last]
        self._total[series[first]] += counts

    def usual(self, series: Numbers) -> Usual:
        """Count, median and deviation of each series; NaN where nothing is known."""
        known = np.where((series >= 0) & (series < len(self._total)), series, -1)
        if not len(self._total):
            nothing = np.full(len(series), np.nan)
            return Usual(np.zeros(len(series), np.int64), nothing, nothing)
        distinct, back = np.unique(known, return_inverse=True)
        values = self._values[distinct]
        count = np.minimum(self._total[distinct], self.window)
        count[distinct < 0] = 0
        median = _middle(values, count)
        with np.errstate(invalid="ignore"):
            apart = np.where(np.isfinite(values), np.abs(values - median[:, None]), np.inf)
        deviation = _ROBUST * _middle(apart, count)
        return Usual(count[back], median[back], deviation[back])

    def _grow(self, series: int) -> None:
        have = len(self._total)
        if series > have:
            more = max(series, 2 * have) - have
            self._values = np.concatenate((self._values, np.full((more, self.window), np.inf)))
            self._total = np.concatenate((self._total, np.zeros(more, np.int64)))


def _middle(values: Floats, count: Numbers) -> Floats:
    """Median of the first `count` of each line, smallest first; empty places hold infinity and come last."""
    ordered = np.sort(values, axis=1)
    lines = np.arange(len(values))
    low, high = ordered[lines, np.maximum(count - 1, 0) // 2], ordered[lines, count // 2]
    return np.where(count > 0, (low + high) / 2, np.nan)
