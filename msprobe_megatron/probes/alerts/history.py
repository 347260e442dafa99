"""The last steps of every series: a ring a series, from which median and median deviation are taken.

Both are the same whatever one value in the window is, so that one bad step neither raises the bar nor blinds the rule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from msprobe_megatron.probes.alerts.seen import Floats, Numbers

_ROBUST = 1.4826
"""Median absolute deviation to standard deviation, for values that are normally distributed."""


class Usual(NamedTuple):
    """What is usual for each asked series: of how many steps that is known, the median, the robust deviation."""

    steps: Numbers
    median: Floats
    deviation: Floats


class Steps:
    """What is usual for a series, from its last `window` steps; a step counts once, however many microbatches it has.

    The deviation is that from step to step or, where that is larger, that between the microbatches of a step.

    Example::

        steps = Steps(window=32)
        steps.add(series, values)          # all values of one step
        steps.usual(series).median
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._levels, self._spreads = History(window), History(window)

    def add(self, series: Numbers, values: Floats) -> None:
        """Take up the values of one step; those that are not finite, or of series -1, are left out."""
        keep = (series >= 0) & np.isfinite(values)
        numbers, levels, spreads = _by_series(series[keep], values[keep])
        self._levels.add(numbers, levels)
        self._spreads.add(numbers, spreads)

    def bounds(self, series: Numbers) -> tuple[Floats, Floats]:
        """Two numbers between which the median of each series is, for sure; infinite where nothing is known.

        Most rows of most steps are told by them to be usual, and never ask for more.
        """
        low, high = self._levels.extent(series)
        # Taken along its slope, a value moves by at most three times what the values span.
        span = 3 * (high - low)
        return low - span, high + span

    def usual(self, series: Numbers) -> Usual:
        """Steps, median and deviation of each series; NaN where nothing is known."""
        levels = self._levels.usual(series)
        between = self._spreads.usual(series).median * _ROBUST
        return levels._replace(deviation=np.fmax(levels.deviation, between))


class History:
    """Rings of the last `window` values of each series; memory is `series` x `window` numbers of four bytes.

    Example::

        history = History(window=32)
        history.add(np.array([0, 1]), np.array([1.5, 2.0]))
        history.usual(np.array([0, 1])).median
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._values = np.full((0, window), np.inf, np.float32)
        self._total = np.zeros(0, np.int64)

    def add(self, series: Numbers, values: Floats) -> None:
        """Take up one finite value of each of these series, which are all different."""
        if not len(series):
            return
        self._grow(int(series.max()) + 1)
        self._values[series, self._total[series] % self.window] = values
        self._total[series] += 1

    def usual(self, series: Numbers) -> Usual:
        """How many values each series has, their median and deviation; NaN where nothing is known."""
        known = np.where((series >= 0) & (series < len(self._total)), series, -1)
        steps = np.zeros(len(series), np.int64)
        median, deviation = np.full(len(series), np.nan), np.full(len(series), np.nan)
        if len(self._total):
            steps = np.where(known >= 0, np.minimum(self._total[known], self.window), 0)
        for count in np.unique(steps[steps > 0]):
            these = np.flatnonzero(steps == count)
            median[these], deviation[these] = _projected(self._in_order(known[these], int(count)))
        return Usual(steps, median, deviation)

    def extent(self, series: Numbers) -> tuple[Floats, Floats]:
        """Smallest and largest value of each series; without any, the whole line."""
        known = (series >= 0) & (series < len(self._total))
        low, high = np.full(len(series), -np.inf), np.full(len(series), np.inf)
        places = series[known]
        places = places[self._total[places] > 0] if len(self._total) else places[:0]
        if len(places):
            there = known.copy()
            there[known] = self._total[series[known]] > 0
            values = self._values[places]
            low[there] = values.min(axis=1)
            high[there] = np.where(np.isinf(values), -np.inf, values).max(axis=1)
        return low, high

    def _in_order(self, series: Numbers, count: int) -> Floats:
        """The values of series that have this many, oldest first."""
        first = self._total[series] % self.window if count == self.window else np.zeros(len(series), np.int64)
        values: Floats = self._values[series[:, None], (first[:, None] + np.arange(count)) % self.window]
        return values.astype(np.float64)

    def _grow(self, series: int) -> None:
        have = len(self._total)
        if series > have:
            more = max(series, 2 * have) - have
            self._values = np.concatenate((self._values, np.full((more, self.window), np.inf, np.float32)))
            self._total = np.concatenate((self._total, np.zeros(more, np.int64)))


def _projected(values: Floats) -> tuple[Floats, Floats]:
    """Median and robust deviation of each line, with its trend taken to the step that comes.

    A loss falls and a norm grows all the time; without the trend, what is usual would be what was usual long ago. The
    slope is the median of the changes over half of the line, which a few outliers do not move.
    """
    count = values.shape[1]
    half = max(count // 2, 1)
    slope = np.median(values[:, half:] - values[:, :-half], axis=1) / half if count > 1 else np.zeros(len(values))
    ahead = values + slope[:, None] * np.arange(count, 0, -1)
    median = np.median(ahead, axis=1)
    return median, _ROBUST * np.median(np.abs(ahead - median[:, None]), axis=1)


def _by_series(series: Numbers, values: Floats) -> tuple[Numbers, Floats, Floats]:
    """The distinct series with the median of their values and the median distance from it."""
    if len(np.unique(series)) == len(series):
        return series, values, np.zeros(len(series))
    numbers, levels = _medians(series, values)
    apart = np.abs(values - levels[np.searchsorted(numbers, series)])
    return numbers, levels, _medians(series, apart)[1]


def _medians(series: Numbers, values: Floats) -> tuple[Numbers, Floats]:
    order = np.lexsort((values, series))
    numbers, first, count = np.unique(series[order], return_index=True, return_counts=True)
    ordered = values[order]
    return numbers, (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) / 2
