"""What a rule sees of a step: its rows as columns, the series of each row, and the usual values of a series.

A series is one tensor over time: its kind, name, io, path, phase and virtual stage; its microbatches are values of one
series. `Steps` keeps the last steps of every series in ring buffers and derives median and median deviation from them,
which one bad step in the window does not change: it neither raises the bar nor blinds the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_megatron.job.features.loss_units import token_counts
from msprobe_megatron.job.record.monitor_files import StepRows
from msprobe_megatron.run_directory.schema import COUNT_COLUMNS, FLOAT_COLUMNS, Row
from msprobe_megatron.topology.layers import layer_of

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
MOST_SERIES = 50_000
"""Series that are remembered; rules with a history do not judge any beyond."""


_ROBUST = 1.4826
"""Median absolute deviation to standard deviation, for values that are normally distributed."""


# Of FLOAT_COLUMNS.
_SQUARED = np.array([name == "sumsq" for name in FLOAT_COLUMNS])


class SeriesNumbers:
    """Gives every series a number, up to `MOST_SERIES`."""

    def __init__(self, most: int = MOST_SERIES) -> None:
        self._known: dict[tuple[Any, ...], int] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._known)

    def of(self, rows: Sequence[Row]) -> Numbers:
        """The numbers of the series that the rows belong to."""
        return np.fromiter(map(self._number, rows), np.int64, len(rows))

    def _number(self, row: Row) -> int:
        key = (row.kind, row.name, row.io, row.path, row.phase, row.vpp)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self._most:
                return -1
            found = self._known[key] = len(self._known)
        return found


class Columns(Mapping[str, Any]):
    """The columns of a step's rows by name, each built on first use.

    ``fixed`` caches columns that do not depend on the statistics; pass the same dict for the same list of rows.
    """

    def __init__(self, seen: StepRows, fixed: dict[str, Any] | None = None) -> None:
        self.seen = seen
        self._made: dict[str, Any] = {}
        self._fixed = fixed if fixed is not None else {}
        slots = self._fixed.get("slot")
        if slots is None:
            slots = self._fixed["slot"] = np.fromiter((row.slot for row in seen.rows), np.int64, len(seen.rows))
        # One line more than there are slots, at -1, for rows without statistics.
        self._floats: Floats = np.concatenate((seen.floats, np.full((1, 5), np.nan)))[slots]
        self._counts: Numbers = np.concatenate((seen.counts, np.full((1, 4), -1)))[slots]
        self.measured: Flags = self._counts[:, 0] >= 0
        partner = self._fixed.get("tokens")
        if partner is None:
            partner = self._fixed["tokens"] = token_counts(seen.rows)
        self.token_sums: Numbers = np.flatnonzero(partner >= 0)
        """Rows of losses that were reported as [sum over tokens, tokens]; they are judged per token, as in the log."""
        self.token_counts: Numbers = partner[self.token_sums]
        if len(self.token_sums):
            tokens = self._floats[self.token_counts, 2]
            with np.errstate(divide="ignore", invalid="ignore"):
                self._floats[self.token_sums] /= tokens[:, None] * np.where(_SQUARED, tokens[:, None], 1.0)

    def __getitem__(self, name: str) -> Any:
        kept = self._fixed if name in _FIXED else self._made
        found = kept.get(name)
        if found is None:
            found = kept[name] = _MAKERS[name](self)
        return found

    @property
    def floating(self) -> Flags:
        """Rows of floating-point tensors; token ids and masks have no usual size."""
        found = self._fixed.get("floating")
        if found is None:
            found = self._fixed["floating"] = np.array(["float" in row.dtype for row in self.seen.rows], bool)
        return np.asarray(found)

    @property
    def sizes(self) -> Floats:
        """Logarithm of every root mean square: minus infinity for zeros, NaN where something is not finite or absent.

        Not of the norm: an expert gets more tokens in one step than in another.
        """
        found = self._made.get("sizes")
        if found is None:
            with np.errstate(divide="ignore", invalid="ignore"):
                mean = np.log(self["sumsq"] / self["numel"]) / 2
                found = self._made["sizes"] = np.where(self["n_nan"] + self["n_inf"] == 0, mean, np.nan)
        return np.asarray(found)

    def __iter__(self) -> Any:
        return iter(_MAKERS)

    def __len__(self) -> int:
        return len(_MAKERS)

    def floats(self, index: int) -> Floats:
        """One of min, max, sum, sumsq, absmax."""
        return self._floats[:, index]

    def counts(self, index: int) -> Floats:
        """One of the numbers of NaN, +Inf, -Inf, zeros; NaN where nothing was measured."""
        return np.where(self.measured, self._counts[:, index], np.nan)

    @property
    def finite(self) -> Floats:
        """How many elements are finite."""
        bad = self["n_nan"] + self["n_inf"]
        return np.asarray(self["numel"] - bad, np.float64)

    def texts(self, field: str) -> npt.NDArray[np.object_]:
        """A field of the rows as objects."""
        found = np.empty(len(self.seen.rows), object)
        found[:] = [getattr(row, field) for row in self.seen.rows]
        return found

    def numbers(self, field: str) -> Floats:
        """A field of the rows as numbers; None becomes NaN."""
        return np.array([np.nan if (v := getattr(row, field)) is None else v for row in self.seen.rows], np.float64)


def _share(part: Floats, whole: Floats) -> Floats:
    share: Floats = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
    return share


def _std(columns: Columns) -> Floats:
    mean = columns["mean"]
    return np.asarray(np.sqrt(np.maximum(_share(columns["sumsq"], columns.finite) - mean * mean, 0.0)))


def _layers(columns: Columns) -> Floats:
    found = [layer_of(row.name) for row in columns.seen.rows]
    return np.array([np.nan if layer is None else layer for layer in found], np.float64)


def _makers() -> dict[str, Callable[[Columns], Any]]:
    found: dict[str, Callable[[Columns], Any]] = {
        "n_inf": lambda c: c["n_posinf"] + c["n_neginf"],
        "norm": lambda c: np.sqrt(c["sumsq"]),
        "mean": lambda c: _share(c["sum"], c.finite),
        "std": _std,
        "zeros": lambda c: _share(c["n_zero"], c["numel"]),
        "step": lambda c: np.full(len(c.seen.rows), float(c.seen.step)),
        "layer": _layers,
    }
    for names, make in (
        (("kind", "name", "io", "path", "phase", "op", "dtype"), Columns.texts),
        (("numel", "microbatch", "seq"), Columns.numbers),
    ):
        found.update({name: partial(_field, make, name) for name in names})
    found.update({name: partial(_field, Columns.floats, i) for i, name in enumerate(FLOAT_COLUMNS)})
    found.update({name: partial(_field, Columns.counts, i) for i, name in enumerate(COUNT_COLUMNS)})
    return found


def _field(make: Callable[[Columns, Any], Any], which: Any, columns: Columns) -> Any:
    return make(columns, which)


_MAKERS = _makers()
_FIXED = frozenset(
    {"kind", "name", "io", "path", "phase", "op", "dtype", "numel", "microbatch", "seq", "layer"},
)


class Usual(NamedTuple):
    """The usual value of each series: the number of steps it is based on, the median, the robust deviation."""

    steps: Numbers
    median: Floats
    deviation: Floats


class Steps:
    """The usual value of a series, from its last `window` steps; a step counts once, whatever its microbatches.

    The deviation is that from step to step or, where that is larger, that between the microbatches of a step.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._levels, self._spreads = History(window), History(window)

    def add(self, series: Numbers, values: Floats) -> None:
        """Add the values of one step; those that are not finite, or of series -1, are skipped."""
        keep = (series >= 0) & np.isfinite(values)
        numbers, levels, spreads = _by_series(series[keep], values[keep])
        self._levels.add(numbers, levels)
        self._spreads.add(numbers, spreads)

    def bounds(self, series: Numbers) -> tuple[Floats, Floats]:
        """Bounds of the median of each series; infinite where nothing is known.

        They are cheap and clear most rows of most steps, for which `usual` is then never computed.
        """
        low, high = self._levels.extent(series)
        # Projected along the slope, a value moves by at most three times the span of the values.
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

        >>> history = History(window=32)
        >>> history.add(np.array([0, 1]), np.array([1.5, 2.0]))
        >>> history.usual(np.array([0, 1])).median
        array([1.5, 2. ])
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._values = np.full((0, window), np.inf, np.float32)
        self._total = np.zeros(0, np.int64)

    def add(self, series: Numbers, values: Floats) -> None:
        """Add one finite value to each of these series, which are all different."""
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
        """Smallest and largest value of each series; infinite where there is none."""
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
        """The values of series with this many of them, oldest first."""
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
    """Median and robust deviation of each line, with its trend projected to the coming step.

    A loss falls and a norm grows all the time; without the trend, the median would lag behind. The slope is the median
    of the changes over half of the line, which a few outliers do not move.
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
